"""What a calibration service may do, where its files are, and what a job's process gets from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from calibrator_service.calibration.spec import CalibrationSpec


@dataclass(frozen=True)
class ModelOptions:
    """How models are loaded. `dtype` and `compute_dtype` are "auto" or a torch dtype's name; `threads` None: torch's
    choice, but no more than CPUs may be used."""

    device: str = "cpu"
    dtype: str = "auto"
    compute_dtype: str = "auto"
    context_length: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class ServiceConfig:
    """`models`: id -> source of the models that can be calibrated. `registry`: where products are published and parents
    looked up. `text_workers`: addresses of workers that may write text. `max_time_budget_s`: a job with a longer budget
    is refused. `job_retention_s`: how long records and logs of ended jobs are kept."""

    models: Mapping[str, str]
    registry: str
    text_folders: tuple[Path, ...] = ()
    hub_datasets: tuple[str, ...] = ()
    text_workers: tuple[str, ...] = ()
    options: ModelOptions = field(default_factory=ModelOptions)
    log_level: str = "info"
    max_queued_jobs: int = 100
    max_time_budget_s: float = math.inf
    job_retention_s: float = math.inf


@dataclass(frozen=True)
class ProcessConfig:
    """The first that a job's process is told. `start`: how often the job has been started."""

    calibration_id: str
    start: int
    parent_pid: int
    spec: CalibrationSpec
    work_dir: Path
    service: ServiceConfig


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
