"""The durable store of calibration jobs, shared by the service and the jobs' processes. Every step is one transaction.

States: queued -> running -> publishing -> succeeded, and failed or cancelled instead of any later one. A running job whose process died
is queued again. A job that cannot be published is waiting, until a retry or a restart of the service makes it publishing again. The
process of a job has the job's `num_starts` as a fencing token: if it was considered dead and replaced, its writes are refused.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import TypeVar

from calibrator_service.calibration.progress import Phase
from calibrator_service.calibration.spec import CalibrationSpec
from calibrator_service.job import (
    JOB_COLUMNS,
    JOBS_MIGRATIONS,
    JOBS_SCHEMA,
    JOBS_SCHEMA_VERSION,
    Job,
    JobState,
    job_from_row,
    unreadable_job_error,
)
from shared.errors import (
    AlreadyExists,
    Cancelled,
    Conflict,
    Corrupt,
    Exhausted,
    NotFound,
)
from shared.sqlite import Database

APPLICATION_ID = 0x6E65616A
MAX_RESUMES = 3
PUBLISHING: Phase = "publishing"
_LARGEST_INTEGER = 2**63 - 1
_QUEUE_RETRY_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class JobCount:
    """Number of jobs of a model in a state, and how often these jobs have been resumed."""

    model_id: str
    state: str
    num_jobs: int
    num_resumes: int


class JobStore:
    """Safe to use from several threads and processes. Raises as `shared.sqlite.Database` does."""

    def __init__(self, path: Path) -> None:
        self.database = Database(
            path,
            schema=JOBS_SCHEMA,
            schema_version=JOBS_SCHEMA_VERSION,
            application_id=APPLICATION_ID,
            migrations=JOBS_MIGRATIONS,
        )

    def close(self) -> None:
        """Idempotent."""
        self.database.close()

    # Called by the servicer.

    def create(
        self,
        request_id: str,
        spec: CalibrationSpec,
        aliases: Sequence[str],
        *,
        max_queued: int,
        answer: Callable[[Job], T],
    ) -> T:
        """Creates the job of `request_id`, unless an earlier call has created it, and returns `answer(job)`.

        `answer` is called before a new job is committed: if it raises, the job is not kept. Raises AlreadyExists if the request id
        was used for another job, Exhausted (QUEUE_FULL), and what `answer` raises.
        """
        encoded = (spec.to_json(), json.dumps(list(aliases)))
        prompts = json.dumps(spec.prompts, separators=(",", ":"))
        with self.database.transaction() as connection:
            known = connection.execute(
                "SELECT calibration_id, spec, aliases FROM jobs WHERE request_id = ?", (request_id,)
            ).fetchone()
            if known is not None:
                same_prompts = self._prompts(known["calibration_id"]) == prompts
                same_spec = _as_asked(known["spec"]) == spec.as_asked().to_json()
                if not same_spec or known["aliases"] != encoded[1] or not same_prompts:
                    raise AlreadyExists(
                        f"request {request_id!r} has already started another calibration, {known['calibration_id']}",
                        metadata={"calibration_id": known["calibration_id"]},
                    )
                return answer(self.get(known["calibration_id"]))
            (num_queued,) = connection.execute(
                "SELECT count(*) FROM jobs WHERE state = 'queued'"
            ).fetchone()
            if num_queued >= max_queued:
                raise Exhausted(
                    f"{num_queued} calibrations are waiting already",
                    reason="QUEUE_FULL",
                    retry_after_s=_QUEUE_RETRY_S,
                )
            calibration_id = f"cal-{secrets.token_hex(8)}"
            connection.execute(
                "INSERT INTO jobs (calibration_id, request_id, model_id, spec, aliases, num_prompts, state, create_time_s)"
                " VALUES (?, ?, ?, ?, ?, ?, 'queued', ?)",
                (
                    *(calibration_id, request_id, spec.model_id),
                    *(*encoded, len(spec.prompts), time.time()),
                ),
            )
            if spec.prompts:
                row = (calibration_id, prompts)
                connection.execute("INSERT INTO job_prompts VALUES (?, ?)", row)
            return answer(self.get(calibration_id))

    def has_request(self, request_id: str) -> bool:
        """Whether a job was created for the request."""
        query = "SELECT 1 FROM jobs WHERE request_id = ?"
        return self.database.row(query, (request_id,)) is not None

    def get(self, calibration_id: str) -> Job:
        """Raises NotFound."""
        query = f"SELECT {JOB_COLUMNS} FROM jobs WHERE calibration_id = ?"
        row = self.database.row(query, (calibration_id,))
        if row is None:
            raise NotFound(
                f"there is no calibration {calibration_id[:80]!r}", reason="CALIBRATION_NOT_FOUND"
            )
        return job_from_row(row)

    def spec(self, calibration_id: str) -> CalibrationSpec:
        """The spec of a job with its prompts. Raises NotFound, Corrupt (JOB_UNREADABLE)."""
        job = self.get(calibration_id)
        try:
            prompts = json.loads(self._prompts(calibration_id))
            return CalibrationSpec.from_json(job.spec_text, prompts)
        except (Corrupt, ValueError) as error:
            raise unreadable_job_error(job, "its spec cannot be read") from error

    def _prompts(self, calibration_id: str) -> str:
        query = "SELECT prompts FROM job_prompts WHERE calibration_id = ?"
        row = self.database.row(query, (calibration_id,))
        return "[]" if row is None else str(row["prompts"])

    def list(self, model_id: str = "", *, before: int | None = None, limit: int = 100) -> list[Job]:
        """Jobs with a number below `before`, newest first; of all models if `model_id` is empty."""
        before = _LARGEST_INTEGER if before is None else min(max(before, 0), _LARGEST_INTEGER)
        rows = self.database.rows(
            f"SELECT {JOB_COLUMNS} FROM jobs WHERE number < ? AND (? = '' OR model_id = ?) ORDER BY number DESC LIMIT ?",
            (before, model_id, model_id, limit),
        )
        return [job_from_row(row) for row in rows]

    def in_state(self, state: JobState) -> tuple[Job, ...]:
        """The oldest first."""
        query = f"SELECT {JOB_COLUMNS} FROM jobs WHERE state = ? ORDER BY number"
        return tuple(map(job_from_row, self.database.rows(query, (state.value,))))

    def count_jobs(self) -> tuple[JobCount, ...]:
        """Counts of all jobs in the store; resumes of jobs that were removed from it count under the state ""."""
        rows = self.database.rows(
            "SELECT model_id, state, count(*), sum(num_resumes) FROM jobs GROUP BY model_id, state"
            " UNION ALL SELECT model_id, '', 0, num_resumes FROM removed_jobs"
        )
        return tuple(JobCount(*row) for row in rows)

    def cancel(self, calibration_id: str) -> Job:
        """Ends a job of which nothing can be published yet, or asks for its end. Changes nothing once it has ended. Raises NotFound.

        A running job's process stops. Of a product that the registry may have already, the publisher finds out whether it has.
        """
        with self.database.transaction() as connection:
            job = self.get(calibration_id)
            if job.state.has_ended or job.cancel_requested:
                return job
            if job.state is JobState.RUNNING:
                change_job(connection, calibration_id, "cancel_requested = 1")
            elif job.publishing:
                change_job(connection, calibration_id, "cancel_requested = 1, state = 'publishing'")
            else:
                end_job(connection, calibration_id, JobState.CANCELLED)
            return self.get(calibration_id)

    # Called by the supervisor.

    def claim(self) -> Job | None:
        """Starts the oldest queued job and returns it; None if no job is queued."""
        with self.database.transaction() as connection:
            row = connection.execute(
                "SELECT calibration_id FROM jobs WHERE state = 'queued' ORDER BY number LIMIT 1"
            ).fetchone()
            if row is None:
                return None
            change_job(
                connection,
                row["calibration_id"],
                "state = 'running', num_resumes = num_resumes + (num_starts > 0), num_starts = num_starts + 1",
            )
            return self.get(row["calibration_id"])

    def list_running(self) -> tuple[Job, ...]:
        """Jobs recorded as running. When a service starts, these are the jobs that a killed service left."""
        return self.in_state(JobState.RUNNING)

    def states(self) -> dict[str, str]:
        """The states of all jobs by their ids."""
        rows = self.database.rows("SELECT calibration_id, state FROM jobs")
        return {row["calibration_id"]: row["state"] for row in rows}

    def remove_ended(self, before_s: float) -> int:
        """Removes the records of jobs that ended before `before_s` (Unix time) and returns their number."""
        is_old = "end_time_s < ? AND state IN ('succeeded', 'failed', 'cancelled')"
        with self.database.transaction() as connection:
            connection.execute(
                "INSERT INTO removed_jobs SELECT model_id, sum(num_resumes) FROM jobs"
                f" WHERE {is_old} GROUP BY model_id"
                " ON CONFLICT (model_id) DO UPDATE SET num_resumes = num_resumes + excluded.num_resumes",
                (before_s,),
            )
            connection.execute(
                f"DELETE FROM job_prompts WHERE calibration_id IN (SELECT calibration_id FROM jobs WHERE {is_old})",
                (before_s,),
            )
            return connection.execute(f"DELETE FROM jobs WHERE {is_old}", (before_s,)).rowcount

    def record_interruption(self, calibration_id: str, how: str, *, is_death: bool) -> Job:
        """Records that the job's process ended without a result: the job is cancelled if that was requested, failed after more than
        MAX_RESUMES deaths, else queued again.

        `how`: a description for people. `is_death`: the process died by itself; False if its service stopped it or was killed.
        """
        with self.database.transaction() as connection:
            job = self.get(calibration_id)
            if job.state is not JobState.RUNNING:
                return job
            if job.cancel_requested:
                end_job(connection, calibration_id, JobState.CANCELLED)
            elif is_death and job.num_deaths >= MAX_RESUMES:
                message = f"the job's process died {job.num_deaths + 1} times, the last time {how}"
                fail_job(connection, calibration_id, "JOB_PROCESS_DIED", message)
            else:
                change_job(
                    connection,
                    calibration_id,
                    "state = 'queued', phase = '', num_deaths = num_deaths + ?",
                    int(is_death),
                )
            return self.get(calibration_id)

    def check_writable(self, calibration_id: str) -> None:
        """Writes the row. Raises as `heartbeat` would if the disk is full or the database cannot be written."""
        with self.database.transaction() as connection:
            # It must change: SQLite does not write a row that stays the same, so that would succeed on a full disk.
            connection.execute(
                "UPDATE jobs SET num_heartbeats = num_heartbeats + 1 WHERE calibration_id = ?",
                (calibration_id,),
            )

    # Called by the job's process; `start` is the `num_starts` with which it was started.

    def heartbeat(self, calibration_id: str, start: int) -> bool:
        """Records that the process is alive. Returns whether it must stop. Raises Conflict if another process runs the job."""
        with self.database.transaction() as connection:
            job = self._owned_job(calibration_id, start)
            connection.execute(
                "UPDATE jobs SET num_heartbeats = num_heartbeats + 1 WHERE calibration_id = ?",
                (calibration_id,),
            )
            return job.cancel_requested

    def progress(
        self,
        calibration_id: str,
        start: int,
        phase: str,
        fraction: float,
        figures: Mapping[str, float],
    ) -> None:
        """Records progress; `figures` are merged with the recorded ones. Raises Conflict."""
        with self.database.transaction() as connection:
            job = self._owned_job(calibration_id, start)
            change_job(
                connection,
                calibration_id,
                "phase = ?, fraction = ?, figures = ?",
                phase,
                min(max(fraction, 0.0), 1.0),
                json.dumps({**job.figures, **figures}),
            )

    def note_problem(self, calibration_id: str, start: int, reason: str, message: str) -> None:
        """Records what the process waits for. Raises Conflict."""
        with self.database.transaction() as connection:
            self._owned_job(calibration_id, start)
            changes = "failure_reason = ?, failure_message = ?"
            change_job(connection, calibration_id, changes, reason, message)

    def finish(self, calibration_id: str, start: int) -> None:
        """Records that the product is on disk. From now on the publisher has the job. Raises Cancelled, Conflict."""
        with self.database.transaction() as connection:
            if self._owned_job(calibration_id, start).cancel_requested:
                raise Cancelled("the calibration was cancelled before it was published")
            change_job(
                connection,
                calibration_id,
                "state = 'publishing', phase = ?, fraction = max(fraction, 0.99), failure_reason = '', failure_message = ''",
                PUBLISHING,
            )

    def fail(self, calibration_id: str, start: int, reason: str, message: str) -> None:
        """Raises Conflict."""
        with self.database.transaction() as connection:
            self._owned_job(calibration_id, start)
            fail_job(connection, calibration_id, reason, message)

    def record_cancelled(self, calibration_id: str, start: int) -> None:
        """Records that the process has stopped as requested. Raises Conflict."""
        with self.database.transaction() as connection:
            self._owned_job(calibration_id, start)
            end_job(connection, calibration_id, JobState.CANCELLED)

    def _owned_job(self, calibration_id: str, start: int) -> Job:
        job = self.get(calibration_id)
        if job.state is not JobState.RUNNING or job.num_starts != start:
            raise Conflict(
                f"calibration {calibration_id} is no longer run by this process",
                reason="JOB_TAKEN_OVER",
            )
        return job


def change_job(connection: Connection, calibration_id: str, changes: str, *values: object) -> None:
    """Makes `changes`, a part of an UPDATE, and raises the revision."""
    connection.execute(
        f"UPDATE jobs SET {changes}, revision = revision + 1 WHERE calibration_id = ?",
        (*values, calibration_id),
    )


def end_job(connection: Connection, calibration_id: str, state: JobState) -> None:
    change_job(
        connection, calibration_id, "state = ?, phase = '', end_time_s = ?", state, time.time()
    )


def fail_job(connection: Connection, calibration_id: str, reason: str, message: str) -> None:
    change_job(
        connection, calibration_id, "failure_reason = ?, failure_message = ?", reason, message
    )
    end_job(connection, calibration_id, JobState.FAILED)


def _as_asked(spec_text: str) -> str:
    """The stored form of a spec as its caller wrote it. The text may be an older build's; one that this build cannot read stays as it is."""
    try:
        return CalibrationSpec.from_json(spec_text).as_asked().to_json()
    except Corrupt:
        return spec_text
