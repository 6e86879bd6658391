"""One calibration job: its states, what is recorded of it, and the table that holds the records."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from sqlite3 import Row

from calibrator_service.job_spec import JobSpec

JOBS_SCHEMA_VERSION = 1
JOBS_SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, calibration_id TEXT NOT NULL UNIQUE, request_id TEXT NOT NULL UNIQUE,
    model_id TEXT NOT NULL, spec TEXT NOT NULL, aliases TEXT NOT NULL, state TEXT NOT NULL, phase TEXT NOT NULL DEFAULT '',
    fraction REAL NOT NULL DEFAULT 0, figures TEXT NOT NULL DEFAULT '{}', create_time_s REAL NOT NULL, end_time_s REAL,
    failure_reason TEXT NOT NULL DEFAULT '', failure_message TEXT NOT NULL DEFAULT '',
    router_version INTEGER NOT NULL DEFAULT 0, manifest_digest TEXT NOT NULL DEFAULT '',
    num_starts INTEGER NOT NULL DEFAULT 0, num_resumes INTEGER NOT NULL DEFAULT 0, num_deaths INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0, publishing INTEGER NOT NULL DEFAULT 0,
    num_heartbeats INTEGER NOT NULL DEFAULT 0, revision INTEGER NOT NULL DEFAULT 1);
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_model ON jobs (model_id, number);
"""


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True)
class Job:
    """One job as it stood when it was read. `number` orders jobs; `revision` grows with every change but heartbeats.

    `publishing`: past the point up to which it can be cancelled. `num_deaths` counts starts that ended without a result and
    not by the service's own doing.
    """

    number: int
    calibration_id: str
    request_id: str
    spec: JobSpec
    aliases: tuple[str, ...]
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
    num_heartbeats: int
    revision: int


def job_of(row: Row) -> Job:
    """The job that a row of the store's table holds."""
    return Job(
        number=row["number"],
        calibration_id=row["calibration_id"],
        request_id=row["request_id"],
        spec=JobSpec.from_json(row["spec"]),
        aliases=tuple(json.loads(row["aliases"])),
        state=JobState(row["state"]),
        phase=row["phase"],
        fraction=row["fraction"],
        figures=json.loads(row["figures"]),
        create_time_s=row["create_time_s"],
        end_time_s=row["end_time_s"],
        failure_reason=row["failure_reason"],
        failure_message=row["failure_message"],
        router_version=row["router_version"],
        manifest_digest=row["manifest_digest"],
        num_starts=row["num_starts"],
        num_resumes=row["num_resumes"],
        num_deaths=row["num_deaths"],
        cancel_requested=bool(row["cancel_requested"]),
        publishing=bool(row["publishing"]),
        num_heartbeats=row["num_heartbeats"],
        revision=row["revision"],
    )
