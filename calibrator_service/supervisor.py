"""Runs the queue of jobs, one at a time, each in a process of its own, and decides what happens after a process has
died."""

import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack

import structlog

from calibrator_service.calibration.spec import Progress
from calibrator_service.job import ENDED_STATES, Ended, Job, JobState, Problem
from calibrator_service.job_process import JobFolder, JobProcess, ProcessConfig
from calibrator_service.jobs import JobStore
from calibrator_service.judge.judge import Judge
from calibrator_service.metrics import CalibratorMetrics
from calibrator_service.publisher import Publisher
from calibrator_service.service_thread import ServiceThread
from shared.calibrator_settings import CalibratorSettings
from shared.errors import NeapError, PreconditionFailed
from shared.files import file_lock, make_private

# How soon a stop and a request to cancel are noticed while a process says nothing.
LISTEN_S = 0.1
# A cancelled job's process is killed if it has not stopped after this time.
CANCEL_GRACE_S = 3.0
# A process that says nothing for this long is considered stuck.
SILENCE_TIMEOUT_S = 120.0
# How long a stop waits for an attempt to publish.
PUBLISHER_TIMEOUT_S = 5.0
# How often an idle queue looks for jobs that are to be removed.
CLEAN_UP_INTERVAL_S = 3600.0
# (description, is_death) of how a process ended.
Interruption = tuple[str, bool]
# How a job ended that was recorded as running when this service started.
_SERVICE_DIED: Interruption = ("with the service itself", False)

log = structlog.get_logger("neap.calibration")


class Supervisor:
    """Owns the job folder: a second service on the same folder is refused with PreconditionFailed (DATA_DIR_IN_USE).

    The constructor queues the jobs again that a killed service left running. Call `start` and `stop` at most once each.
    `on_change` is called after each change of a job, by any thread. `judge`: tries what jobs publish. `queue`: to be
    woken when there is a new job.
    """

    def __init__(
        self,
        folder: JobFolder,
        settings: CalibratorSettings,
        *,
        metrics: CalibratorMetrics | None = None,
        on_change: Callable[[], object] = lambda: None,
        judge: Judge | None = None,
    ) -> None:
        self.settings = settings
        self._folder = folder
        self._metrics = metrics or CalibratorMetrics()
        make_private(folder.root)  # jobs, their logs and their text hold prompts
        folder.log_root.mkdir(exist_ok=True)
        in_use = PreconditionFailed(f"another calibration service works in {folder.root}", reason="DATA_DIR_IN_USE")
        self._lock = ExitStack()
        self._lock.enter_context(file_lock(folder.lock, timeout_s=0, locked=in_use))
        self.store = JobStore(folder.store, on_change)
        # The kernel kills a job's process when the thread that started it ends, so this thread lives as long as the
        # service.
        self.queue = ServiceThread("calibrations", self._run_next)
        # How the processes of jobs have ended, until it is recorded; running jobs that are to stop.
        self._interruptions: dict[str, Interruption] = {}
        self._cancelled: set[str] = set()
        self._publisher = Publisher(
            folder,
            self.store,
            settings.registry,
            self._metrics,
            signs_later=bool(settings.require_signatures),
            judge=judge,
        )
        self._threads = (self._publisher.thread, self.queue)
        self._record_interruptions()
        self._clean_up()
        self._metrics.observe(settings.sources, self.store, lambda: self.is_alive, lambda: self.is_held_up)

    def start(self, *, on_failure: Callable[[], object] = lambda: None) -> None:
        """`on_failure` is called from the queue's or the publisher's thread if an unexpected exception ends it."""
        for thread in self._threads:
            thread.start(on_failure)

    @property
    def has_died(self) -> bool:
        """Whether an unexpected exception has ended the queue's or the publisher's thread."""
        return any(thread.has_died for thread in self._threads)

    @property
    def is_alive(self) -> bool:
        """Whether the queue's and the publisher's thread run."""
        return all(thread.is_alive for thread in self._threads)

    @property
    def is_held_up(self) -> bool:
        """Whether the queue or the publisher waits for the disk or the job store."""
        return any(thread.is_held_up for thread in self._threads)

    def cancel(self, calibration_id: str) -> Job:
        """Cancels a job: see `JobStore.cancel`."""
        job = self.store.cancel(calibration_id)
        if job.cancel_requested:
            self._cancelled.add(calibration_id)
        self._publisher.hurry(calibration_id)
        self.queue.wake()
        return job

    def retry(self, calibration_id: str) -> Job:
        """Lets a finished job be published now: see `JobStore.retry`."""
        job = self.store.retry(calibration_id)
        self._publisher.hurry(calibration_id)
        return job

    def stop(self) -> None:
        """Stops the running job's process; the next service resumes the job. Blocks for a few seconds at most."""
        self.queue.stopping.set()
        self._publisher.thread.stop(PUBLISHER_TIMEOUT_S)
        self.queue.stop()
        self.store.close()
        self._lock.close()

    def _run_next(self) -> float:
        """Runs the next job. Returns the seconds until there may be another one."""
        self._record_interruptions()
        self._clean_up()
        job = self.store.claim()
        self.queue.is_held_up = False
        if job is None:
            return CLEAN_UP_INTERVAL_S
        self._run_claimed(job)
        return 0.0

    def _record_interruptions(self) -> None:
        """Called when no process runs: jobs recorded as running have ended.
        The death of a service is not held against its job."""
        for job in self.store.in_state(JobState.RUNNING):
            how, is_death = self._interruptions.get(job.calibration_id, _SERVICE_DIED)
            after = self.store.record_interruption(job.calibration_id, how, is_death=is_death)
            log.warning("interrupted", calibration_id=job.calibration_id, how=how, state=after.state)
            if is_death and after.state is not JobState.CANCELLED:
                self._metrics.process_deaths.labels(job.model_id).inc()
        self._interruptions.clear()

    def _run_claimed(self, job: Job) -> None:
        """Runs a claimed job until it has ended or is to be run again.
        Fails one that cannot be run, so that the queue continues."""
        self._interruptions[job.calibration_id] = ("before its end could be recorded", False)
        try:
            ended = self._supervise(job)
        except (NeapError, OSError):
            raise
        except Exception:
            log.exception("cannot be run", calibration_id=job.calibration_id)
            message = f"internal error; the service's log has it under {job.calibration_id}"
            ended = Ended(JobState.FAILED, "INTERNAL", message)
        if isinstance(ended, Ended):
            self.store.record_end(job.calibration_id, ended)
        else:
            self._interruptions[job.calibration_id] = ended
        self._record_interruptions()
        self._cancelled.discard(job.calibration_id)
        after = self.store.get(job.calibration_id)
        log.info("ended", calibration_id=job.calibration_id, state=after.state, reason=after.failure_reason)
        if after.state.has_ended:
            self._metrics.count_ended_job(after)
            shutil.rmtree(self._folder.work(job.calibration_id), ignore_errors=True)
        self._publisher.hurry(job.calibration_id)

    def _supervise(self, job: Job) -> Ended | Interruption:
        """Raises OSError if the process cannot be started, which does not count as its death."""
        if job.model_id not in self.settings.sources:
            message = f"model {job.model_id!r} is no longer configured"
            return Ended(JobState.FAILED, "MODEL_NOT_FOUND", message)
        log.info("starting", calibration_id=job.calibration_id, start=job.num_starts)
        config = ProcessConfig(
            calibration_id=job.calibration_id,
            start=job.num_starts,
            parent_pid=os.getpid(),
            spec=job.spec + job.prompts,
            work_dir=self._folder.work(job.calibration_id).absolute(),
            settings=self.settings,
        )
        process = JobProcess(config, self._folder.log(job.calibration_id))
        try:
            return self._listen(job.calibration_id, process)
        finally:
            process.kill()
            log.info("exited", calibration_id=job.calibration_id, how=process.describe_exit())

    def _listen(self, calibration_id: str, process: JobProcess) -> Ended | Interruption:
        """Records what the process says until it has ended or must be killed, and returns how it ended."""
        ended: Ended | None = None
        heard_at_s, cancelled_at_s = time.monotonic(), math.inf
        while not self.queue.stopping.is_set():
            try:
                report = process.hear(LISTEN_S)
            except EOFError:
                break
            now_s = time.monotonic()
            if report is not None:
                heard_at_s = now_s
            if isinstance(report, Ended):
                ended = report
            elif isinstance(report, Progress | Problem):
                try:
                    self.store.record(calibration_id, report)
                    self.queue.is_held_up = False
                except NeapError as error:
                    log.warning("progress not recorded", reason=error.reason)
                    self.queue.is_held_up = True
            if now_s - heard_at_s > SILENCE_TIMEOUT_S:
                return f"after {SILENCE_TIMEOUT_S:.0f} s without a sign of life", True
            if calibration_id in self._cancelled and cancelled_at_s == math.inf:
                cancelled_at_s = now_s
                process.ask_to_stop()
            if now_s - cancelled_at_s > CANCEL_GRACE_S:
                return "when it did not stop in time", True
        if ended is not None:
            return ended
        if self.queue.stopping.is_set():
            return "when the service stopped", False
        process.kill()  # without effect on what has ended by itself
        return process.describe_exit(), True

    def _clean_up(self) -> None:
        """Removes the records of jobs that ended long ago, the files of jobs that have ended, and files without a
        job."""
        try:
            num_removed = self.store.remove_ended(time.time() - 86_400 * self.settings.job_retention_days)
            states = self.store.states()
        except NeapError as error:
            log.warning("old jobs cannot be removed now", reason=error.reason)
            return
        if num_removed:
            log.info("old jobs removed", num_jobs=num_removed)
        for work_dir in self._folder.work_root.glob("*"):
            if states.get(work_dir.name, JobState.CANCELLED) in ENDED_STATES:
                shutil.rmtree(work_dir, ignore_errors=True)
        for job_log in self._folder.log_root.glob("*.log"):
            if job_log.stem not in states:
                job_log.unlink(missing_ok=True)
