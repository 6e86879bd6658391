"""Where the files of a calibration service are, and what a job's process gets from it."""

from dataclasses import dataclass
from pathlib import Path

from calibrator_service.calibration.spec import CalibrationSpec
from shared.service_settings import CalibratorSettings


@dataclass(frozen=True)
class ProcessConfig:
    """The first that a job's process is told. `start`: how often the job has been started."""

    calibration_id: str
    start: int
    parent_pid: int
    spec: CalibrationSpec
    work_dir: Path
    settings: CalibratorSettings


class JobFolder:
    """Paths of the job store and of the jobs' files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store, self.lock = root / "jobs.db", root / "service.lock"
        self.work_root, self.log_root = root / "work", root / "logs"

    def work(self, calibration_id: str) -> Path:
        return self.work_root / calibration_id

    def log(self, calibration_id: str) -> Path:
        return self.log_root / f"{calibration_id}.log"
