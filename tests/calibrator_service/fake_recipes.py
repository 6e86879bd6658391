"""Recipes that replace the calibration in a real job process. The spec's first prompt selects what they do.

The service's process finds this module through PYTHONPATH.
"""

import errno
import json
import os
import signal
import time
from pathlib import Path

from calibrator_service.calibration.progress import Progress
from calibrator_service.calibration.spec import SelfGenerated
from calibrator_service.recipe import Product, Task
from shared.errors import Cancelled, Exhausted, NotFound, UnsupportedModel
from shared.registry import blobs

# The service's process starts in the repository, but finds modules of this folder only.
MANIFEST = Path(__file__).parents[2] / "bench" / "router" / "manifest.json"


def count(task: Task, name: str) -> int:
    """Counts the calls over all processes of the job."""
    file = task.work_dir / name
    number = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(number))
    return number


def run(task: Task) -> Product:
    assert isinstance(task.spec.source, SelfGenerated)
    behaviour = task.spec.source.prompts[0] if task.spec.source.prompts else ""
    attempt = count(task, "attempts")
    task.progress(Progress("collecting", 0.25, {"tokens": 1000.0, "attempt": float(attempt)}))
    if behaviour == "wait":
        while not task.should_stop():
            time.sleep(0.02)
        raise Cancelled("stopped as asked")
    if behaviour == "deaf":
        time.sleep(600)
    if behaviour == "wait-once" and attempt == 1:
        time.sleep(600)
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "die-once" and attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "bug":
        raise RuntimeError("secret detail")
    if behaviour == "no-model":
        raise NotFound(f"there is no model at {task.source}", reason="MODEL_NOT_FOUND")
    if behaviour == "unsupported":
        raise UnsupportedModel("no decoder layers were found")
    if behaviour == "no-dataset":
        raise NotFound("there is no dataset 'nobody/nothing'", reason="DATASET_NOT_FOUND")
    if behaviour == "full-work-dir":
        raise OSError(errno.ENOSPC, "No space left on device")
    if behaviour == "full-registry":
        blobs.os.fsync = _full  # type: ignore[assignment]
    if behaviour == "unrecorded-once" and attempt == 1:
        _refuse_the_end()
    if behaviour == "die-publishing":
        _die_after_the_publication(task)
    task.progress(Progress("training_heads", 0.3, {"loss": 1.0}))
    while behaviour == "until-told" and not (task.work_dir / "go").exists():
        time.sleep(0.02)
    manifest = {
        **json.loads(MANIFEST.read_text(encoding="utf-8")),
        # Not reproducible on purpose: publishing again after a crash must not train again.
        "calibration": {"seconds": time.time(), "attempt": attempt},
    }
    return Product(manifest, {"ladder.safetensors": os.urandom(1000)})


def _full(descriptor: int) -> None:
    # The registry's folder only: the job's own files are written through the same call before.
    path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    if "/registry/" in path:
        raise OSError(errno.ENOSPC, "No space left on device")


def _refuse_the_end() -> None:
    """Simulates a full disk when the publication is recorded in the job store."""
    from calibrator_service.jobs import JobStore

    def full(*_: object) -> None:
        raise Exhausted("no space left for jobs.db", reason="DISK_FULL")

    JobStore.succeed = full  # type: ignore[method-assign, assignment]


def _die_after_the_publication(task: Task) -> None:
    """Kills the first process after the registry's commit and before the job store's."""
    from calibrator_service.jobs import JobStore

    if not hasattr(JobStore, "real_succeed"):
        JobStore.real_succeed = JobStore.succeed  # type: ignore[attr-defined]
        JobStore.succeed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, misc, method-assign]
