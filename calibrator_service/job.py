"""One calibration job: its states, its record, and the schema of the table of records."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from sqlite3 import Row

from neap_client.calibration.v1 import calibration_pb2

from calibrator_service.calibration.spec import Progress
from calibrator_service.spec_messages import read_spec

# Raised when states are added, too.
JOBS_SCHEMA_VERSION = 5
# Prompts may have megabytes, and every report of progress writes the job's whole row, so they have rows of their own,
# until the job has ended.
JOBS_SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, calibration_id TEXT NOT NULL UNIQUE, request_id TEXT NOT NULL UNIQUE,
    model_id TEXT NOT NULL, spec BLOB NOT NULL, prompts_digest TEXT NOT NULL, state TEXT NOT NULL,
    phase TEXT NOT NULL DEFAULT '',
    fraction REAL NOT NULL DEFAULT 0, figures TEXT NOT NULL DEFAULT '{}', create_time_s REAL NOT NULL,
    end_time_s REAL,
    failure_reason TEXT NOT NULL DEFAULT '', failure_message TEXT NOT NULL DEFAULT '',
    router_version INTEGER NOT NULL DEFAULT 0, manifest_digest TEXT NOT NULL DEFAULT '',
    num_starts INTEGER NOT NULL DEFAULT 0, num_resumes INTEGER NOT NULL DEFAULT 0,
    num_deaths INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0, publishing INTEGER NOT NULL DEFAULT 0,
    revision INTEGER NOT NULL DEFAULT 1, num_prompts INTEGER NOT NULL DEFAULT 0);
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_model ON jobs (model_id, number);
CREATE TABLE job_prompts (calibration_id TEXT PRIMARY KEY, prompts BLOB NOT NULL);
CREATE TABLE removed_jobs (model_id TEXT PRIMARY KEY, num_resumes INTEGER NOT NULL);
"""


class JobState(StrEnum):
    """PUBLISHING: the product is finished, and the service publishes it. WAITING: it could not be published, and is
    kept until somebody says what to do."""

    QUEUED = "queued"
    RUNNING = "running"
    PUBLISHING = "publishing"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self in ENDED_STATES


ENDED_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True)
class Ended:
    """How the work of a job has ended: PUBLISHING with a finished product on disk, FAILED with a reason and a message,
    or CANCELLED."""

    state: JobState
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class Problem:
    """What a job's process waits for."""

    reason: str
    message: str


# What a job's process tells its service. "": it is alive.
Report = Progress | Problem | Ended | str


@dataclass(frozen=True)
class Job:
    """A job at the time it was read. `number` orders jobs; `revision` increases with every change.

    `spec`: bytes of a CalibrationSpec of the protos. `prompts`: those of one that has its prompts alone; empty if the
    job was read without them or has ended. `publishing`: an attempt to publish the product has begun, so the registry
    may have the version. `num_deaths` counts processes that died by themselves while their service was running.
    """

    number: int
    calibration_id: str
    request_id: str
    model_id: str
    spec: bytes
    prompts_digest: str
    state: JobState
    phase: str
    fraction: float
    figures: Mapping[str, float]
    create_time_s: float
    end_time_s: float | None
    failure_reason: str
    failure_message: str
    router_version: int
    manifest_digest: str
    num_starts: int
    num_resumes: int
    num_deaths: int
    cancel_requested: bool
    publishing: bool
    revision: int
    num_prompts: int
    prompts: bytes = b""

    @property
    def message(self) -> calibration_pb2.CalibrationSpec:
        """The spec. Raises Corrupt (JOB_UNREADABLE) if this build cannot read it."""
        return read_spec(self.spec + self.prompts, self.calibration_id)[0]


def job_from_row(row: Row) -> Job:
    """Reads a row of the table of jobs, with the job's prompts if it has a column of them."""
    values = dict(row)
    parsed = {
        "prompts": values.get("prompts") or b"",
        "state": JobState(values["state"]),
        "figures": json.loads(values["figures"]),
        "cancel_requested": bool(values["cancel_requested"]),
        "publishing": bool(values["publishing"]),
    }
    return Job(**{**values, **parsed})
