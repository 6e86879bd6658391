"""The process of one job: `python -m calibrator_service.worker_process`, with its configuration on standard input.

The process records progress and result in the job store, where the supervisor reads them. Exit status 0: the job's end is recorded.
3: another process has taken the job over. 4: the job store could not be written, so the job has to be run again.
"""

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from calibrator_service.calibration.progress import Progress
from calibrator_service.calibration.spec import AnswerFile, CalibrationSpec, HubDataset, TextFile
from calibrator_service.finished import load_product, save_product
from calibrator_service.hub_datasets import check_source, is_public_only
from calibrator_service.jobs import PUBLISHING, JobStore
from calibrator_service.lineage import fetch_statistics
from calibrator_service.parent import die_with_parent
from calibrator_service.process_config import TAKEN_OVER, UNRECORDED, JobFolder, ProcessConfig
from calibrator_service.recipe import Product, Task
from calibrator_service.text_files import find_text_file
from shared.errors import Cancelled, Conflict, NeapError, Unavailable
from shared.file_lock import file_lock
from shared.rpc.logs import configure_logging
from shared.rpc.service_logs import log_all_output, log_stdout
from shared.storage import storage_error

HEARTBEAT_INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 0.2
LOCK_TIMEOUT_S = 30.0
SAVE_PAUSE_S = 1.0

log = structlog.get_logger("neap.calibration")


class Reporter:
    """Records progress and heartbeats in the job store, and learns there whether the job was cancelled.

    Progress within a phase is written at most once per `PROGRESS_INTERVAL_S`.
    """

    def __init__(self, store: JobStore, calibration_id: str, start: int) -> None:
        self._store = store
        self._calibration_id = calibration_id
        self._start = start
        self._stop = threading.Event()
        self._phase = ""
        self._written_at_s = 0.0
        self._unwritten: dict[str, float] = {}
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def should_stop(self) -> bool:
        return self._stop.is_set()

    def progress(self, progress: Progress) -> None:
        """Never fails the job: figures that cannot be recorded now are logged and merged into the next report."""
        self._unwritten.update(progress.figures)
        now_s = time.monotonic()
        if progress.phase == self._phase and now_s - self._written_at_s < PROGRESS_INTERVAL_S:
            return
        try:
            self._store.progress(
                self._calibration_id,
                self._start,
                progress.phase,
                progress.fraction,
                self._unwritten,
            )
        except Conflict:
            self._stop.set()
            return
        except NeapError as error:
            log.warning("progress not recorded", reason=error.reason)
            return
        self._phase, self._written_at_s, self._unwritten = progress.phase, now_s, {}

    def note_problem(self, problem: NeapError) -> None:
        """Shows what the process waits for, if that can be recorded."""
        with suppress(NeapError):
            reason, message = problem.reason, problem.message
            self._store.note_problem(self._calibration_id, self._start, reason, message)

    def _send_heartbeats(self) -> None:
        while not self._stop.is_set():
            try:
                if self._store.heartbeat(self._calibration_id, self._start):
                    self._stop.set()
            except Conflict:
                self._stop.set()
            except NeapError as error:
                log.warning("heartbeat not recorded", reason=error.reason)
            time.sleep(HEARTBEAT_INTERVAL_S)


def run_job(config: ProcessConfig) -> None:
    """Runs the job and records how it ended. Raises Conflict if another process has taken it over, and what the store raises."""
    folder = JobFolder(Path(config.folder))
    store = JobStore(folder.store)
    job_id, start = config.calibration_id, config.start
    try:
        work_dir = folder.work(job_id)
        work_dir.mkdir(parents=True, exist_ok=True)
        taken = Unavailable("another process still works on this calibration", reason="JOB_LOCKED")
        # Waits, because the process that this one replaces may take a moment to die.
        with file_lock(work_dir / "lock", timeout_s=LOCK_TIMEOUT_S, locked=taken):
            _make_product(config, store, work_dir, Reporter(store, job_id, start))
    except Conflict as error:
        if error.reason == "JOB_TAKEN_OVER":
            raise
        store.fail(job_id, start, error.reason, error.message)
    except Cancelled:
        log.info("cancelled")
        store.record_cancelled(job_id, start)
    except NeapError as error:
        log.exception("failed", reason=error.reason)
        store.fail(job_id, start, error.reason, error.message)
    except OSError as error:
        known = storage_error(error, "its files", place="the calibration's folder")
        log.exception("failed", reason=known.reason)
        store.fail(job_id, start, known.reason, known.message)
    except Exception:
        log.exception("failed unexpectedly")
        message = f"internal error; the service's log has it under {job_id}"
        store.fail(job_id, start, "INTERNAL", message)
    else:
        # If this cannot be written, the job has not failed: the next start finds the product.
        try:
            store.finish(job_id, start)
        except Cancelled:
            store.record_cancelled(job_id, start)


def _make_product(
    config: ProcessConfig, store: JobStore, work_dir: Path, reporter: Reporter
) -> None:
    """Leaves the finished product in `work_dir`, from where the service publishes it."""
    if load_product(work_dir) is not None:
        log.info("found finished")
        return
    reporter.progress(Progress("loading", 0.0, {}))
    spec = _resolve_source(store.spec(config.calibration_id), config)
    task = Task(
        source=config.source,
        spec=spec,
        options=config.options,
        text_workers=config.text_workers,
        work_dir=work_dir,
        parent_statistics=fetch_statistics(config.registry, spec, work_dir),
        progress=reporter.progress,
        should_stop=reporter.should_stop,
    )
    product = _load_recipe(config.recipe)(task)
    reporter.progress(Progress(PUBLISHING, 0.99, {}))
    while not reporter.should_stop():
        try:
            save_product(work_dir, product)
            return
        except OSError as error:
            # Hours of work are in memory only: they wait for room.
            known = storage_error(error, "its product", place="the calibration's folder")
            log.warning("the product cannot be saved yet", reason=known.reason)
            reporter.note_problem(known)
            time.sleep(SAVE_PAUSE_S)
    raise Cancelled("the calibration was cancelled at its end")


def _resolve_source(spec: CalibrationSpec, config: ProcessConfig) -> CalibrationSpec:
    """The spec with the real path of its file, or with the access to its dataset. Raises InvalidInput, NotFound.

    The source was checked when the job was created, but files, symlinks and settings may have changed since.
    """
    source = spec.source
    if isinstance(source, HubDataset):
        check_source(source, config.hub_datasets)
        public_only = is_public_only(source.name, config.hub_datasets)
        return replace(spec, source=replace(source, public_only=public_only))
    if isinstance(source, TextFile | AnswerFile):
        path = find_text_file(source.path, [Path(folder) for folder in config.text_folders])
        return replace(spec, source=replace(source, path=str(path)))
    return spec


def _load_recipe(name: str) -> Callable[[Task], Product]:
    module, _, attribute = name.partition(":")
    recipe: Callable[[Task], Product] = getattr(importlib.import_module(module), attribute)
    return recipe


def main() -> int:
    config = ProcessConfig.from_line(sys.stdin.readline())
    die_with_parent(config.parent_pid, sys.stdin)
    configure_logging(config.log_level, json_lines=True)
    log_stdout()
    structlog.contextvars.bind_contextvars(calibration_id=config.calibration_id, start=config.start)
    try:
        run_job(config)
    except Conflict:
        log.warning("taken over by another process")
        return TAKEN_OVER
    except NeapError as error:
        log.exception("the job's end could not be recorded", reason=error.reason)
        return UNRECORDED
    return 0


if __name__ == "__main__":
    log_all_output()
    status = main()
    # Python's own exit would report what could not be flushed, to a log on a full disk, in place of the status.
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(status)
