"""A job's process whose ranks stop themselves once, or such a rank without a service: the file "stop-in" of the
service's folder names rank and phase.

The service's process finds this module through PYTHONPATH, and so does each rank's, which imports it by another name.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from calibrator_service import rank, recipe, worker_process
from calibrator_service.calibration.ranks import Ranks
from calibrator_service.calibration.spec import CalibrationSpec, Progress
from calibrator_service.lineage import ParentFiles
from calibrator_service.recipe import Product
from shared.calibrator_settings import CalibratorSettings


def run(
    spec: CalibrationSpec,
    settings: CalibratorSettings,
    work_dir: Path,
    parent_files: ParentFiles | None,
    progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    ranks: Ranks,
) -> Product | None:
    stopping = partial(_stop_in, work_dir, ranks.rank, progress)
    return recipe.run(spec, settings, work_dir, parent_files, stopping, should_stop, ranks)


def _stop_in(work_dir: Path, rank: int, tell: Callable[[Progress], None], progress: Progress) -> None:
    tell(progress)
    wanted = work_dir.parents[2] / "stop-in"
    if wanted.exists() and wanted.read_text() == f"{rank} {progress.phase}":
        wanted.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


worker_process.run = rank.run = run

if __name__ == "__main__":
    sys.exit(rank.main() if "WORLD_SIZE" in os.environ else worker_process.main())
