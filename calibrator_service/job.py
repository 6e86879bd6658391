"""One calibration job: its states, its record, and the schema of the table of records."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from sqlite3 import Row

from calibrator_service.calibration.progress import Progress
from calibrator_service.calibration.spec import CalibrationSpec
from shared.errors import Corrupt

JOBS_SCHEMA_VERSION = 2
# Prompts may have megabytes, and every report of progress writes the job's whole row, so they have rows of their own.
_MORE_TABLES = """
CREATE TABLE job_prompts (calibration_id TEXT PRIMARY KEY, prompts TEXT NOT NULL);
CREATE TABLE removed_jobs (model_id TEXT PRIMARY KEY, num_resumes INTEGER NOT NULL);
"""
JOBS_SCHEMA = f"""
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, calibration_id TEXT NOT NULL UNIQUE, request_id TEXT NOT NULL UNIQUE,
    model_id TEXT NOT NULL, spec TEXT NOT NULL, aliases TEXT NOT NULL, state TEXT NOT NULL,
    phase TEXT NOT NULL DEFAULT '',
    fraction REAL NOT NULL DEFAULT 0, figures TEXT NOT NULL DEFAULT '{{}}', create_time_s REAL NOT NULL,
    end_time_s REAL,
    failure_reason TEXT NOT NULL DEFAULT '', failure_message TEXT NOT NULL DEFAULT '',
    router_version INTEGER NOT NULL DEFAULT 0, manifest_digest TEXT NOT NULL DEFAULT '',
    num_starts INTEGER NOT NULL DEFAULT 0, num_resumes INTEGER NOT NULL DEFAULT 0,
    num_deaths INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0, publishing INTEGER NOT NULL DEFAULT 0,
    num_heartbeats INTEGER NOT NULL DEFAULT 0, revision INTEGER NOT NULL DEFAULT 1,
    num_prompts INTEGER NOT NULL DEFAULT 0);
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX jobs_by_model ON jobs (model_id, number);
{_MORE_TABLES}
"""
# In version 1 prompts were a part of the spec, and the process that had made a product published it.
JOBS_MIGRATIONS = {
    1: f"""
ALTER TABLE jobs ADD COLUMN num_prompts INTEGER NOT NULL DEFAULT 0;
{_MORE_TABLES}
UPDATE jobs SET num_prompts = coalesce(json_array_length(spec, '$.source.prompts'), 0) WHERE json_valid(spec);
INSERT INTO job_prompts SELECT calibration_id, json_extract(spec, '$.source.prompts') FROM jobs WHERE num_prompts > 0;
UPDATE jobs SET spec = json_remove(spec, '$.source.prompts') WHERE json_valid(spec);
UPDATE jobs SET state = 'publishing', phase = 'publishing' WHERE publishing AND state IN ('queued', 'running');
"""
}


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

    `publishing`: an attempt to publish the product has begun, so the registry may have the version. `num_deaths` counts
    processes that died by themselves while their service was running. `prompts_text`: the spec's prompts, if the job
    was read with them.

    The properties parse columns that are stored as text, once. They raise Corrupt (JOB_UNREADABLE) if another build
    wrote a text that this one cannot read. The fields suffice for the queue, so it can handle such a job.
    """

    number: int
    calibration_id: str
    request_id: str
    model_id: str
    spec_text: str
    aliases_text: str
    state_text: str
    phase: str
    fraction: float
    figures_text: str
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
    prompts_text: str = "[]"

    @cached_property
    def state(self) -> JobState:
        try:
            return JobState(self.state_text)
        except ValueError as error:
            raise unreadable_job_error(self, "its state is not one this build knows") from error

    @cached_property
    def spec(self) -> CalibrationSpec:
        """Without prompts, if the job was read without them."""
        try:
            return CalibrationSpec.from_json(self.spec_text, json.loads(self.prompts_text))
        except Corrupt as error:
            raise unreadable_job_error(self, error.message) from error
        except ValueError as error:
            raise unreadable_job_error(self, "its prompts cannot be read") from error

    @cached_property
    def aliases(self) -> tuple[str, ...]:
        try:
            return tuple(map(str, json.loads(self.aliases_text)))
        except (ValueError, TypeError) as error:
            raise unreadable_job_error(self, "its aliases cannot be read") from error

    @cached_property
    def figures(self) -> Mapping[str, float]:
        try:
            return {str(name): float(n) for name, n in json.loads(self.figures_text).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise unreadable_job_error(self, "its figures cannot be read") from error


# What a Job is read from. Its prompts are in another table.
JOB_COLUMNS = ", ".join(
    f"{field.name.removesuffix('_text')} AS {field.name}" for field in fields(Job) if field.name != "prompts_text"
)


def unreadable_job_error(job: Job, why: str) -> Corrupt:
    """The error for a record that this build cannot read. Its metadata has those fields of the job that can be read."""
    return Corrupt(
        f"the record of calibration {job.calibration_id} cannot be read by this build: {why}",
        reason="JOB_UNREADABLE",
        metadata={
            "calibration_id": job.calibration_id,
            "state": str(job.state_text),
            "failure_reason": str(job.failure_reason),
        },
    )


def job_from_row(row: Row) -> Job:
    """Reads a row of JOB_COLUMNS."""
    values = dict(row)
    flags = {name: bool(values[name]) for name in ("cancel_requested", "publishing")}
    return Job(**{**values, **flags})
