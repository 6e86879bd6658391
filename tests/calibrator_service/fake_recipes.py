"""A job's process whose work is faked: the spec's first prompt selects what it does.

The service's process finds this module through PYTHONPATH.
"""

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from calibrator_service import recipe, worker_process
from calibrator_service.calibration.spec import CalibrationSpec, Progress
from calibrator_service.lineage import ParentFiles
from calibrator_service.recipe import Product
from shared.calibrator_settings import CalibratorSettings
from shared.errors import Cancelled, NotFound, UnsupportedModel

# The service's process starts in the repository, but finds modules of this folder only.
MANIFEST = Path(__file__).parents[2] / "bench" / "router" / "manifest.json"


def count(work_dir: Path, name: str) -> int:
    """Counts the calls over all processes of the job."""
    file = work_dir / name
    number = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(number))
    return number


def run(
    spec: CalibrationSpec,
    settings: CalibratorSettings,
    work_dir: Path,
    parent_files: ParentFiles | None,
    progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    ranks: object = None,
) -> Product:
    behaviour = (*getattr(spec.source, "prompts", ()), "")[0]
    if behaviour == "real":
        stopping = partial(_stop_in, work_dir, progress)
        return recipe.run(spec, settings, work_dir, parent_files, stopping, should_stop)
    attempt = count(work_dir, "attempts")
    progress(Progress("collecting", 0.25, {"tokens": 1000.0, "attempt": float(attempt)}))
    if behaviour == "wait":
        while not should_stop():
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
        raise NotFound(f"there is no model at {settings.sources['tiny'].source}", reason="MODEL_NOT_FOUND")
    if behaviour == "unsupported":
        raise UnsupportedModel("no decoder layers were found")
    if behaviour == "no-dataset":
        raise NotFound("there is no dataset 'nobody/nothing'", reason="DATASET_NOT_FOUND")
    if behaviour == "full-work-dir":
        raise OSError(errno.ENOSPC, "No space left on device")
    if behaviour == "no-room-for-product":
        _fill_the_disk()
    progress(Progress("training_heads", 0.3, {"loss": 1.0}))
    while behaviour == "until-told" and not (work_dir / "go").exists():
        time.sleep(0.02)
    manifest = {
        **json.loads(MANIFEST.read_text(encoding="utf-8")),
        # Not reproducible on purpose: publishing again after a crash must not train again.
        "calibration": {"seconds": time.time(), "attempt": attempt},
    }
    blobs = {"ladder.safetensors": os.urandom(1000)}
    if (
        parent_files is not None and parent_files.statistics is not None
    ):  # what the parent knew, and what this job learned
        blobs["statistics.safetensors"] = parent_files.statistics.read_bytes() + b" and more"
    elif behaviour == "with-statistics":
        blobs["statistics.safetensors"] = b"sums"
    return Product(manifest, blobs)


def _stop_in(work_dir: Path, tell: Callable[[Progress], None], progress: Progress) -> None:
    """Stops this process once, in the phase that the file "stop-in" of the service's folder names."""
    tell(progress)
    wanted = work_dir.parents[2] / "stop-in"
    if wanted.exists() and wanted.read_text() == progress.phase:
        wanted.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


def _fill_the_disk() -> None:
    """The product cannot be saved before there is a file "room"."""
    real = worker_process.save_product

    def save(work_dir: Path, product: Product) -> None:
        if not (work_dir / "room").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(work_dir, product)

    worker_process.save_product = save


if __name__ == "__main__":
    worker_process.run = run
    worker_process.main()
