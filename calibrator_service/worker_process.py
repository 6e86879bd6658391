"""The process of one job: `python -m calibrator_service.worker_process`, configuration on standard input.

It reports to the job store and ends; the supervisor learns everything from there. Exit status 0 means that the job's end is
recorded, 3 that the job was no longer this process's, 4 that the job store could not be written: the job is then to be run again.
"""

import fcntl
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import structlog

from calibrator_service.finished import load_product, save_product
from calibrator_service.hub_datasets import check_allowed, check_hub_dataset, is_public_only
from calibrator_service.job_spec import (
    HubDataset,
    JobSpec,
    Progress,
    ProgressReport,
    TextFile,
)
from calibrator_service.jobs import PUBLISHING, JobStore
from calibrator_service.parent import die_with_parent
from calibrator_service.process_config import TAKEN_OVER, UNRECORDED, JobFolder, ProcessConfig
from calibrator_service.publishing import publish
from calibrator_service.recipe import Product, Task
from calibrator_service.text_files import find_text_file
from shared.errors import Cancelled, Conflict, NeapError, Unavailable
from shared.rpc.logs import configure_logging
from shared.rpc.service_logs import log_all_output, log_stdout
from shared.storage import storage_error

HEARTBEAT_INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 0.2
LOCK_TIMEOUT_S = 30.0

log = structlog.get_logger("neap.calibration")


class Reporter:
    """Progress to the job store, at most one write per `PROGRESS_INTERVAL_S` and phase; cancellation from it."""

    def __init__(self, store: JobStore, calibration_id: str, start: int) -> None:
        self._store = store
        self._calibration_id = calibration_id
        self._start = start
        self._stop = threading.Event()
        self._phase = ""
        self._written_at_s = 0.0
        self._unwritten: dict[str, float] = {}
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def should_stop(self) -> bool:
        return self._stop.is_set()

    def progress(self, progress: ProgressReport) -> None:
        """Never fails the job: what cannot be recorded now is merged into the next report, and logged."""
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

    def _beat(self) -> None:
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
    """Do the job and record how it ended. Raises Conflict when it is no longer this process's, and what the store raises."""
    folder = JobFolder(Path(config.folder))
    store = JobStore(folder.store)
    job_id, start = config.calibration_id, config.start
    try:
        work_dir = folder.work(job_id)
        work_dir.mkdir(parents=True, exist_ok=True)
        with (work_dir / "lock").open("w") as lock:
            _lock(lock)
            reporter = Reporter(store, job_id, start)
            product = _product(config, store, work_dir, reporter)
            made = publish(config, store, product)
    except Conflict as error:
        if error.reason == "JOB_TAKEN_OVER":
            raise
        store.fail(job_id, start, error.reason, error.message)
    except Cancelled:
        log.info("cancelled")
        store.cancelled(job_id, start)
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
        # Where this cannot be written the job has not failed, for it is published; the next start finds that out.
        store.succeed(job_id, start, made.version, made.manifest_digest)


def _product(config: ProcessConfig, store: JobStore, work_dir: Path, reporter: Reporter) -> Product:
    finished = load_product(work_dir)
    if finished is not None:
        log.info("found finished, publishing it")
        return finished
    reporter.progress(Progress("loading", 0.0, {}))
    spec = store.get(config.calibration_id).spec
    task = Task(
        source=config.source,
        spec=_resolved(spec, config),
        options=config.options,
        work_dir=work_dir,
        progress=reporter.progress,
        should_stop=reporter.should_stop,
        public_only=isinstance(spec.source, HubDataset)
        and is_public_only(spec.source.name, config.hub_datasets),
    )
    product = _recipe(config.recipe)(task)
    if reporter.should_stop():
        raise Cancelled("the calibration was cancelled at its end")
    reporter.progress(Progress(PUBLISHING, 0.99, {}))
    save_product(work_dir, product)
    # Read back: JSON has turned tuples into lists, and a resumed job must publish the very same.
    saved = load_product(work_dir)
    assert saved is not None
    return saved


def _resolved(spec: JobSpec, config: ProcessConfig) -> JobSpec:
    # Checked when the job was created, too; but files, symlinks and settings may have changed since.
    if isinstance(spec.source, HubDataset):
        check_hub_dataset(**asdict(spec.source))
        check_allowed(spec.source.name, config.hub_datasets)
    if not isinstance(spec.source, TextFile):
        return spec
    path = find_text_file(spec.source.path, [Path(folder) for folder in config.text_folders])
    return replace(spec, source=replace(spec.source, path=str(path)))


def _recipe(name: str) -> Callable[[Task], Product]:
    module, _, attribute = name.partition(":")
    recipe: Callable[[Task], Product] = getattr(importlib.import_module(module), attribute)
    return recipe


def _lock(lock: IO[str]) -> None:
    """The process this one replaces may take a moment to die."""
    give_up_at_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > give_up_at_s:
                raise Unavailable(
                    "another process still works on this calibration", reason="JOB_LOCKED"
                ) from error
        time.sleep(0.1)


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
