"""The configuration of a job's process, which it gets as one line of JSON on standard input."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

DEFAULT_RECIPE = "calibrator_service.recipe:run"
# Exit statuses of a job's process. TAKEN_OVER: another process runs the job; UNRECORDED: the job store could not be written.
TAKEN_OVER, UNRECORDED = 3, 4


@dataclass(frozen=True)
class ModelOptions:
    """How models are loaded. `dtype` and `compute_dtype` are "auto" or a torch dtype's name; `threads` None: torch's choice, but no more
    than CPUs may be used."""

    device: str = "cpu"
    dtype: str = "auto"
    compute_dtype: str = "auto"
    context_length: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class ProcessConfig:
    """`start` is the job's fencing token. `registry`: where a parent's statistics are fetched. `recipe` ("module:function") does the
    work; see `calibrator_service.recipe`."""

    folder: str
    calibration_id: str
    start: int
    parent_pid: int
    source: str
    text_folders: tuple[str, ...]
    hub_datasets: tuple[str, ...]
    registry: str
    options: ModelOptions
    text_workers: tuple[str, ...] = ()
    log_level: str = "info"
    recipe: str = DEFAULT_RECIPE

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "ProcessConfig":
        record = json.loads(line)
        record["options"] = ModelOptions(**record["options"])
        for name in ("text_folders", "hub_datasets", "text_workers"):
            record[name] = tuple(record[name])
        return cls(**record)


@dataclass(frozen=True)
class JobFolder:
    """Paths of the job store and of the jobs' files."""

    root: Path

    @property
    def store(self) -> Path:
        return self.root / "jobs.db"

    @property
    def lock(self) -> Path:
        return self.root / "service.lock"

    @property
    def work_root(self) -> Path:
        return self.root / "work"

    def work(self, calibration_id: str) -> Path:
        return self.work_root / calibration_id

    @property
    def log_root(self) -> Path:
        return self.root / "logs"

    def log(self, calibration_id: str) -> Path:
        return self.log_root / f"{calibration_id}.log"
