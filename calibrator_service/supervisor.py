"""Runs the queue of jobs, one at a time, each in a process of its own, and decides what happens after a process has died."""

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import structlog

from calibrator_service.job import ENDED_STATES, Job, JobState
from calibrator_service.jobs import JobCount, JobStore
from calibrator_service.metrics import CalibratorMetrics
from calibrator_service.process_config import (
    DEFAULT_RECIPE,
    UNRECORDED,
    JobFolder,
    ModelOptions,
    ProcessConfig,
)
from calibrator_service.publisher import Publisher
from shared.errors import Corrupt, NeapError, PreconditionFailed
from shared.file_lock import file_lock

POLL_INTERVAL_S = 0.1
# A cancelled job's process is killed if it has not stopped after this time.
CANCEL_GRACE_S = 3.0
# A process that records no heartbeat for this long is considered stuck.
HEARTBEAT_TIMEOUT_S = 120.0
TERMINATE_TIMEOUT_S = 3.0
RETRY_INTERVAL_S = 5.0
# How often an idle queue looks for jobs that are to be removed.
CLEAN_UP_INTERVAL_S = 3600.0
# (description, is_death) of a job that was recorded as running when this service started.
_SERVICE_DIED = ("with the service itself", False)

log = structlog.get_logger("neap.calibration")


@dataclass(frozen=True)
class SupervisorConfig:
    """`models`: id -> source. `job_retention_s`: how long records and logs of ended jobs are kept."""

    models: Mapping[str, str]
    registry: str
    text_folders: tuple[Path, ...] = ()
    hub_datasets: tuple[str, ...] = ()
    text_workers: tuple[str, ...] = ()
    options: ModelOptions = field(default_factory=ModelOptions)
    log_level: str = "info"
    recipe: str = DEFAULT_RECIPE
    job_retention_s: float = math.inf


class Supervisor:
    """Owns the job folder: a second service on the same folder is refused with PreconditionFailed (DATA_DIR_IN_USE).

    The constructor queues the jobs again that a killed service left running. Call `start` and `stop` at most once each.
    """

    def __init__(
        self,
        folder: JobFolder,
        config: SupervisorConfig,
        *,
        metrics: CalibratorMetrics | None = None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._metrics = metrics or CalibratorMetrics()
        folder.root.mkdir(parents=True, exist_ok=True)
        folder.log_root.mkdir(exist_ok=True)
        in_use = PreconditionFailed(
            f"another calibration service works in {folder.root}", reason="DATA_DIR_IN_USE"
        )
        self._lock = ExitStack()
        self._lock.enter_context(file_lock(folder.lock, timeout_s=0, locked=in_use))
        self.store = JobStore(folder.store)
        self._stop = threading.Event()
        self._wake = threading.Event()
        # The kernel kills a job's process when the thread that started it ends, so this thread lives as long as the service.
        self._thread = threading.Thread(target=self._run, name="calibrations", daemon=True)
        self._on_failure: Callable[[], object] = lambda: None
        self._has_died = self._is_held_up = False
        # (description, is_death) of jobs whose process has ended, until it is recorded.
        self._outcomes: dict[str, tuple[str, bool]] = {}
        self._publisher = Publisher(folder, self.store, config.registry, self._metrics)
        self._record_outcomes()
        self._clean_up()
        self._metrics.observe(self)

    def start(self, *, on_failure: Callable[[], object] = lambda: None) -> None:
        """`on_failure` is called from the queue's or the publisher's thread if an unexpected exception ends it."""
        self._on_failure = on_failure
        self._publisher.start(on_failure)
        self._thread.start()

    @property
    def has_died(self) -> bool:
        """Whether an unexpected exception has ended the queue's or the publisher's thread."""
        return self._has_died or self._publisher.has_died

    @property
    def is_alive(self) -> bool:
        """Whether the queue's and the publisher's thread run."""
        return self._thread.is_alive() and self._publisher.is_alive

    @property
    def is_held_up(self) -> bool:
        """Whether the queue or the publisher waits for the disk or the job store."""
        return self._is_held_up or self._publisher.is_held_up

    def count_jobs(self) -> tuple[JobCount, ...]:
        """Counts of all jobs in the store. Raises as the store does."""
        return self.store.count_jobs()

    def list_running(self) -> tuple[Job, ...]:
        """Running jobs. Raises as the store does."""
        return self.store.list_running()

    def wake(self) -> None:
        """Makes the queue check at once for jobs that were created."""
        self._wake.set()

    def cancel(self, calibration_id: str) -> Job:
        """Cancels a job: see `JobStore.cancel`."""
        job = self.store.cancel(calibration_id)
        self._publisher.hurry(calibration_id)
        self._wake.set()
        return job

    def retry(self, calibration_id: str) -> Job:
        """Lets a finished job be published now: see `Publisher.retry`."""
        return self._publisher.retry(calibration_id)

    def stop(self) -> None:
        """Stops the running job's process; the next service resumes the job. Blocks for a few seconds at most."""
        self._stop.set()
        self._wake.set()
        self._publisher.stop()
        if self._thread.is_alive():
            self._thread.join()
        self.store.close()
        self._lock.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._run_next()
        except Exception:
            log.exception("the queue has died")
            self._has_died = True
            self._on_failure()

    def _run_next(self) -> None:
        """Runs the next job, or waits until there may be one."""
        try:
            self._wake.clear()
            if self._stop.is_set():
                return  # its wake-up may be the one that was just cleared
            self._record_outcomes()
            self._clean_up()
            job = self.store.claim()
            self._is_held_up = False
            if job is None:
                self._wake.wait(CLEAN_UP_INTERVAL_S)
            else:
                self._run_claimed(job)
        except (NeapError, OSError):
            # A full disk or a locked database: the queue must go on when that has passed.
            log.exception("the queue is held up")
            self._is_held_up = True
            self._stop.wait(RETRY_INTERVAL_S)

    def _record_outcomes(self) -> None:
        """Called when no process runs: jobs recorded as running have ended. The death of a service is not held against its job."""
        for job in self.store.list_running():
            how, is_death = self._outcomes.get(job.calibration_id, _SERVICE_DIED)
            after = self.store.record_interruption(job.calibration_id, how, is_death=is_death)
            log.warning(
                "interrupted", calibration_id=job.calibration_id, how=how, state=after.state
            )
            if is_death and after.state is not JobState.CANCELLED:
                self._metrics.process_deaths.labels(job.model_id).inc()
        self._outcomes.clear()

    def _run_claimed(self, job: Job) -> None:
        """Runs a claimed job until it has ended or is to be run again."""
        self._run_or_fail(job)
        after = self.store.get(job.calibration_id)
        log.info(
            "ended",
            calibration_id=job.calibration_id,
            state=after.state,
            reason=after.failure_reason,
        )
        if after.state.has_ended:
            self._metrics.count_ended_job(after)
            shutil.rmtree(self._folder.work(job.calibration_id), ignore_errors=True)
        self._publisher.wake()

    def _run_or_fail(self, job: Job) -> None:
        """Fails a job that this build cannot run, so that the queue continues."""
        try:
            model_id = job.spec.model_id
        except Corrupt as error:
            log.warning("not understood", calibration_id=job.calibration_id, reason=error.reason)
            self.store.fail(job.calibration_id, job.num_starts, error.reason, error.message)
            return
        source = self._config.models.get(model_id)
        if source is None:
            message = f"model {model_id!r} is no longer configured"
            self.store.fail(job.calibration_id, job.num_starts, "MODEL_NOT_FOUND", message)
            return
        try:
            self._supervise(job, source)
        except (NeapError, OSError):
            raise
        except Exception:
            log.exception("cannot be run", calibration_id=job.calibration_id)
            message = f"internal error; the service's log has it under {job.calibration_id}"
            self.store.fail(job.calibration_id, job.num_starts, "INTERNAL", message)

    def _supervise(self, job: Job, source: str) -> None:
        log.info("starting", calibration_id=job.calibration_id, start=job.num_starts)
        # In case it cannot be started or this thread fails; neither counts as a death of the job's process.
        self._outcomes[job.calibration_id] = ("before it could be watched", False)
        with self._folder.log(job.calibration_id).open("ab") as job_log:
            process = self._spawn(job, source, job_log)
            try:
                self._outcomes[job.calibration_id] = self._watch(job, process)
            finally:
                _kill(process)
        log.info("exited", calibration_id=job.calibration_id, exit_status=process.returncode)
        self._record_outcomes()
        if process.returncode == UNRECORDED:
            self._is_held_up = True
            self._stop.wait(RETRY_INTERVAL_S)

    def _spawn(self, job: Job, source: str, job_log: IO[bytes]) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", "calibrator_service.worker_process"],
            stdin=subprocess.PIPE,
            stdout=job_log,
            stderr=job_log,
            # Ctrl-C in a terminal then reaches the service only, and the whole group can be killed.
            start_new_session=True,
        )
        config = ProcessConfig(
            folder=str(self._folder.root.absolute()),
            calibration_id=job.calibration_id,
            start=job.num_starts,
            parent_pid=os.getpid(),
            source=source,
            text_folders=tuple(map(str, self._config.text_folders)),
            hub_datasets=self._config.hub_datasets,
            text_workers=self._config.text_workers,
            registry=self._config.registry,
            options=self._config.options,
            log_level=self._config.log_level,
            recipe=self._config.recipe,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(config.to_line().encode())
            process.stdin.flush()
        except BrokenPipeError:
            log.warning("died at once", calibration_id=job.calibration_id)
        return process

    def _watch(self, job: Job, process: "subprocess.Popen[bytes]") -> tuple[str, bool]:
        """Waits until the process has ended or must be killed. Returns (description of how it ended, whether it died by itself)."""
        num_heartbeats, heard_at_s = -1, time.monotonic()
        cancelled_at_s: float | None = None
        now = job
        while process.poll() is None:
            if self._stop.is_set():
                return "when the service stopped", False
            try:
                now = self.store.get(job.calibration_id)
            except NeapError as error:
                log.warning("the job store cannot be read", reason=error.reason)
            now_s = time.monotonic()
            if now.num_heartbeats != num_heartbeats:
                num_heartbeats, heard_at_s = now.num_heartbeats, now_s
            if now_s - heard_at_s > HEARTBEAT_TIMEOUT_S:
                if self._records_heartbeats(job):
                    return f"after {HEARTBEAT_TIMEOUT_S:.0f} s without a sign of life", True
                heard_at_s = now_s
            if now.cancel_requested and cancelled_at_s is None:
                cancelled_at_s = now_s
            if cancelled_at_s is not None and now_s - cancelled_at_s > CANCEL_GRACE_S:
                return "when it did not stop in time", True
            self._stop.wait(POLL_INTERVAL_S)
        if process.returncode == UNRECORDED:
            return "unable to record its end", False
        return _describe_exit(process.returncode), True

    def _records_heartbeats(self, job: Job) -> bool:
        """Whether a live process could record heartbeats, which it cannot while the disk is full or the store is unavailable."""
        try:
            self.store.check_writable(job.calibration_id)
        except NeapError as error:
            log.warning("heartbeats cannot be recorded", reason=error.reason)
            self._is_held_up = True
            return False
        self._is_held_up = False
        return True

    def _clean_up(self) -> None:
        """Removes the records of jobs that ended long ago, the files of jobs that have ended, and files without a job."""
        try:
            num_removed = self.store.remove_ended(time.time() - self._config.job_retention_s)
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


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kills the process and its group. It need not clean up: a resumed job uses complete files only."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(TERMINATE_TIMEOUT_S)
        except (ProcessLookupError, PermissionError):
            pass
        except subprocess.TimeoutExpired:
            continue
    process.wait()
    if process.stdin is not None:
        try:
            process.stdin.close()
        except BrokenPipeError:
            log.debug("pipe already broken")


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    name = signal.Signals(-status).name
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"by {name}{hint}"
