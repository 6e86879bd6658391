"""The process of one job: `python -m calibrator_service.worker_process FD`, where FD is its end of a pipe to its
service.

It is told what to do through the pipe, and tells how far it is and how it has ended. The service records that.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import structlog

from calibrator_service.calibration.spec import CalibrationSpec, Progress
from calibrator_service.job import Ended, JobState, Problem, Report
from calibrator_service.job_process import ProcessConfig
from calibrator_service.learning.traffic_file import with_text
from calibrator_service.lineage import ParentFiles, fetch_parent
from calibrator_service.recipe import load_product, run, save_product
from calibrator_service.spec_messages import read_spec
from shared.errors import Cancelled, NeapError, Unavailable
from shared.files import file_lock, storage_error
from shared.rpc.logs import configure_logging, log_all_output, log_stdout

if TYPE_CHECKING:
    from calibrator_service.calibration.ranks import Ranks

SIGN_OF_LIFE_INTERVAL_S = 5.0
# Progress within a phase is told at most once in this time.
PROGRESS_INTERVAL_S = 0.2
_PR_SET_PDEATHSIG = 1


class ServiceLink:
    """Safe to use from several threads. `stop`: the service wants the job to end.

    Kills this process's group when the service ends, even by SIGKILL: then the pipe is closed, which a thread notices.
    On Linux the kernel also sends SIGKILL, which reaches a process that is stuck while it holds the interpreter's lock.
    """

    def __init__(self, pipe: Connection, parent_pid: int) -> None:
        self._pipe, self._lock = pipe, threading.Lock()
        self.stop = threading.Event()
        self._phase, self._told_at_s = "", 0.0
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # If the parent died before the call, no signal comes.
            if os.getppid() != parent_pid:
                os._exit(1)
        threading.Thread(target=self._listen, name="service-link", daemon=True).start()

    def progress(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.phase != self._phase or now_s - self._told_at_s >= PROGRESS_INTERVAL_S:
            self._phase, self._told_at_s = progress.phase, now_s
            self.tell(progress)

    def tell(self, report: Report) -> None:
        """Never fails the job. Without its service this process is killed anyway."""
        with self._lock, suppress(OSError):
            self._pipe.send(report)

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self.tell("")
                if self._pipe.poll(SIGN_OF_LIFE_INTERVAL_S):
                    self._pipe.recv()
                    self.stop.set()
        os.killpg(0, signal.SIGKILL)


LOCK_TIMEOUT_S = 30.0
SAVE_PAUSE_S = 1.0

log = structlog.get_logger("neap.calibration")


def run_job(config: ProcessConfig, service: ServiceLink) -> Ended:
    """Runs the job, which leaves its finished product in its folder, from where the service publishes it."""
    return outcome(lambda: _run_locked(config, service), config.calibration_id)


def outcome(work: Callable[[], Ended | None], calibration_id: str) -> Ended:
    """How `work` ends: as it says, by what it raises, or with a finished product."""
    try:
        ended = work()
    except Cancelled:
        log.info("cancelled")
        return Ended(JobState.CANCELLED)
    except NeapError as error:
        log.exception("failed", reason=error.reason)
        return Ended(JobState.FAILED, error.reason, error.message)
    except OSError as error:
        known = storage_error(error, "its files", place="the calibration's folder")
        log.exception("failed", reason=known.reason)
        return Ended(JobState.FAILED, known.reason, known.message)
    except Exception:
        log.exception("failed unexpectedly")
        message = f"internal error; the service's log has it under {calibration_id}"
        return Ended(JobState.FAILED, "INTERNAL", message)
    return ended or Ended(JobState.PUBLISHING)


def _run_locked(config: ProcessConfig, service: ServiceLink) -> Ended | None:
    config.work_dir.mkdir(parents=True, exist_ok=True)
    locked = Unavailable("another process still works on this calibration", reason="JOB_LOCKED")
    # Waits, because the process that this one replaces may take a moment to die.
    with file_lock(config.work_dir / "lock", timeout_s=LOCK_TIMEOUT_S, locked=locked):
        return _run(config, service)


def _run(config: ProcessConfig, service: ServiceLink) -> Ended | None:
    if load_product(config.work_dir) is not None:
        log.info("found finished")
        return None
    service.progress(Progress("loading", 0.0))
    spec, parent_files = made_ready(config)
    if spec.ranks > 1:
        from calibrator_service.rank_processes import run_by_ranks  # which imports this module

        return run_by_ranks(config, spec.ranks, service)
    make_product(config, spec, parent_files, service)
    return None


def made_ready(config: ProcessConfig) -> tuple[CalibrationSpec, ParentFiles | None]:
    """The spec and its parent's files. The job's folder has its text and these from now on."""
    # The source was checked when the job was created, but files, symlinks and settings may have changed since.
    spec = with_text(read_spec(config.spec, config.calibration_id)[1], config.work_dir, config.settings)
    return spec, fetch_parent(config.settings.registry, spec, config.work_dir)


def make_product(
    config: ProcessConfig,
    spec: CalibrationSpec,
    parent_files: ParentFiles | None,
    service: ServiceLink,
    ranks: "Ranks | None" = None,
) -> None:
    """Calibrates, and leaves the product in the job's folder, if this is the first of the ranks."""
    product = run(spec, config.settings, config.work_dir, parent_files, service.progress, service.stop.is_set, ranks)
    if product is None:
        return
    service.progress(Progress("publishing", 0.99))
    while not service.stop.is_set():
        try:
            save_product(config.work_dir, product)
            return
        except OSError as error:
            # Hours of work are in memory only: they wait for room.
            known = storage_error(error, "its product", place="the calibration's folder")
            log.warning("the product cannot be saved yet", reason=known.reason)
            service.tell(Problem(known.reason, known.message))
            service.stop.wait(SAVE_PAUSE_S)
    raise Cancelled("the calibration was cancelled at its end")


def begin(config: ProcessConfig, **names: object) -> None:
    """Sets up the logs of a job's process. `names`: what its lines have beside the job's id."""
    configure_logging(config.settings.log_level, json_lines=True)
    log_stdout()
    structlog.contextvars.bind_contextvars(calibration_id=config.calibration_id, start=config.start, **names)


def end(status: int) -> None:
    """Ends this process at once."""
    # Python's own exit would wait for threads, and report what a log on a full disk could not take.
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(status)


def main() -> None:
    log_all_output()
    pipe = Connection(int(sys.argv[-1]))
    config: ProcessConfig = pipe.recv()
    service = ServiceLink(pipe, config.parent_pid)
    begin(config)
    service.tell(run_job(config, service))
    end(0)


if __name__ == "__main__":
    main()
