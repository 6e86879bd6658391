"""The durable store of calibration jobs. Every step is one transaction, and only their service makes any.

States: queued -> running -> publishing -> succeeded, and failed or cancelled instead of any later one. A running job
whose process died is queued again. A job that cannot be published is waiting, until a retry or a restart of the service
makes it publishing again.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection

from neap_client.calibration.v1 import calibration_pb2

from calibrator_service.calibration.spec import Progress
from calibrator_service.job import (
    JOBS_SCHEMA,
    JOBS_SCHEMA_VERSION,
    Ended,
    Job,
    JobState,
    Problem,
    job_from_row,
)
from calibrator_service.spec_messages import as_asked, stored_spec
from shared.digests import digest_of
from shared.errors import AlreadyExists, Exhausted, NotFound, PreconditionFailed
from shared.registry.base import PublishedVersion
from shared.sqlite import Database

APPLICATION_ID = 0x6E65616A
MAX_RESUMES = 3
# Records of older jobs are removed once these have ended, however short ago.
MAX_RECORDS = 10_000
_LARGEST_INTEGER = 2**63 - 1
_QUEUE_RETRY_S = 30.0

# Columns of a job and their new values.
Changes = Mapping[str, object]


@dataclass(frozen=True)
class JobCount:
    """Number of jobs of a model in a state, and how often these jobs have been resumed."""

    model_id: str
    state: str
    num_jobs: int
    num_resumes: int


# The fraction of a job that has nothing left to do but to publish.
PUBLISHING_FRACTION = 0.99


class JobStore:
    """Safe to use from several threads. Raises as `shared.sqlite.Database` does.

    `on_change` is called after each change of a job, by the thread that made it.
    """

    def __init__(self, path: Path, on_change: Callable[[], object] = lambda: None) -> None:
        self._on_change = on_change
        self.database = Database(
            path,
            schema=JOBS_SCHEMA,
            schema_version=JOBS_SCHEMA_VERSION,
            application_id=APPLICATION_ID,
        )

    def close(self) -> None:
        """Idempotent."""
        self.database.close()

    # What clients ask for.

    def create(self, request_id: str, message: calibration_pb2.CalibrationSpec, *, max_queued: int) -> Job:
        """Creates the job of `request_id`, unless an earlier call has created it.

        Raises AlreadyExists if the request id was used for another job, Exhausted (QUEUE_FULL).
        """
        spec, prompts = stored_spec(message)
        digest = digest_of(prompts)
        with self.database.transaction() as connection:
            known = connection.execute("SELECT calibration_id FROM jobs WHERE request_id = ?", (request_id,)).fetchone()
            if known is not None:
                job = self.get(known["calibration_id"])
                if (digest, as_asked(spec)) != (job.prompts_digest, as_asked(job.spec)):
                    raise AlreadyExists(
                        f"request {request_id!r} has already started another calibration, {job.calibration_id}",
                        metadata={"calibration_id": job.calibration_id},
                    )
                return job
            (num_queued,) = connection.execute("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
            if num_queued >= max_queued:
                raise Exhausted(
                    f"{num_queued} calibrations are waiting already", reason="QUEUE_FULL", retry_after_s=_QUEUE_RETRY_S
                )
            calibration_id = f"cal-{secrets.token_hex(8)}"
            connection.execute(
                "INSERT INTO jobs (calibration_id, request_id, model_id, spec, prompts_digest, num_prompts, state, "
                "create_time_s) VALUES (?, ?, ?, ?, ?, ?, 'queued', ?)",
                (
                    *(calibration_id, request_id, message.model_id, spec, digest),
                    *(len(message.self_generated.prompts), time.time()),
                ),
            )
            if prompts:
                connection.execute("INSERT INTO job_prompts VALUES (?, ?)", (calibration_id, prompts))
            job = self.get(calibration_id)
            # However fast jobs are made and cancelled.
            _remove_ended(connection, "number <= ?", job.number - MAX_RECORDS)
            return job

    def has_request(self, request_id: str) -> bool:
        """Whether a job was created for the request."""
        query = "SELECT 1 FROM jobs WHERE request_id = ?"
        return self.database.row(query, (request_id,)) is not None

    def get(self, calibration_id: str, *, with_prompts: bool = False) -> Job:
        """Raises NotFound."""
        tables = "jobs LEFT JOIN job_prompts USING (calibration_id)" if with_prompts else "jobs"
        row = self.database.row(f"SELECT * FROM {tables} WHERE calibration_id = ?", (calibration_id,))
        if row is None:
            raise NotFound(f"there is no calibration {calibration_id[:80]!r}", reason="CALIBRATION_NOT_FOUND")
        return job_from_row(row)

    def list(self, model_id: str = "", *, before: int | None = None, limit: int = 100) -> list[Job]:
        """Jobs with a number below `before`, newest first; of all models if `model_id` is empty."""
        before = _LARGEST_INTEGER if before is None else min(max(before, 0), _LARGEST_INTEGER)
        rows = self.database.rows(
            "SELECT * FROM jobs WHERE number < ? AND (? = '' OR model_id = ?) ORDER BY number DESC LIMIT ?",
            (before, model_id, model_id, limit),
        )
        return [job_from_row(row) for row in rows]

    def cancel(self, calibration_id: str) -> Job:
        """Ends a job of which nothing can be published yet, or asks for its end. Changes nothing once it has ended.
        Raises NotFound.

        A running job's process must be stopped. Where the registry may have the product already, the
        publisher finds out.
        """

        def changes(job: Job) -> Changes:
            if job.state.has_ended or job.cancel_requested:
                return {}
            if job.state is JobState.RUNNING:
                return {"cancel_requested": True}
            if job.publishing:
                return {"cancel_requested": True, "state": JobState.PUBLISHING}
            return _ended(JobState.CANCELLED)

        return self._change(calibration_id, changes)

    def retry(self, calibration_id: str) -> Job:
        """Lets a waiting job be published. Changes nothing for one that is being published.
        Raises NotFound, PreconditionFailed."""

        def changes(job: Job) -> Changes:
            if job.state in (JobState.WAITING, JobState.PUBLISHING):
                return {"state": JobState.PUBLISHING} if job.state is JobState.WAITING else {}
            raise PreconditionFailed(
                f"calibration {calibration_id} has no product that waits to be published; it is {job.state}",
                reason="NOTHING_TO_PUBLISH",
            )

        return self._change(calibration_id, changes)

    # What the queue and the metrics read of all jobs.

    def in_state(self, state: JobState) -> tuple[Job, ...]:
        """The oldest first."""
        query = "SELECT * FROM jobs WHERE state = ? ORDER BY number"
        return tuple(map(job_from_row, self.database.rows(query, (state.value,))))

    def count_jobs(self) -> tuple[JobCount, ...]:
        """Counts of all jobs in the store; resumes of jobs that were removed from it count under the state ""."""
        rows = self.database.rows(
            "SELECT model_id, state, count(*), sum(num_resumes) FROM jobs GROUP BY model_id, state"
            " UNION ALL SELECT model_id, '', 0, num_resumes FROM removed_jobs"
        )
        return tuple(JobCount(*row) for row in rows)

    def states(self) -> dict[str, str]:
        """The states of all jobs by their ids."""
        rows = self.database.rows("SELECT calibration_id, state FROM jobs")
        return {row["calibration_id"]: row["state"] for row in rows}

    def remove_ended(self, before_s: float) -> int:
        """Removes the records of jobs that ended before `before_s` (Unix time) and returns their number."""
        with self.database.transaction() as connection:
            return _remove_ended(connection, "end_time_s < ?", before_s)

    # A job's work, recorded by the supervisor.

    def claim(self) -> Job | None:
        """Starts the oldest queued job and returns it with its prompts; None if no job is queued."""
        with self.database.transaction() as connection:
            row = connection.execute(
                "SELECT calibration_id FROM jobs WHERE state = 'queued' ORDER BY number LIMIT 1"
            ).fetchone()
            if row is None:
                return None
            connection.execute(
                "UPDATE jobs SET state = 'running', num_resumes = num_resumes + (num_starts > 0), num_starts = "
                "num_starts + 1, revision = revision + 1 WHERE calibration_id = ?",
                tuple(row),
            )
            job = self.get(row["calibration_id"], with_prompts=True)
        self._on_change()
        return job

    def record(self, calibration_id: str, report: Progress | Problem) -> None:
        """Records how a running job gets on. Its figures are merged with the recorded ones."""

        def changes(job: Job) -> Changes:
            if isinstance(report, Problem):
                return {"failure_reason": report.reason, "failure_message": report.message}
            return {
                "phase": report.phase,
                # Less than a whole until it is published. A resumed job begins with what it had done.
                "fraction": min(max(report.fraction, job.fraction), PUBLISHING_FRACTION),
                "figures": json.dumps({**job.figures, **report.figures}),
            }

        self._change(calibration_id, changes)

    def record_end(self, calibration_id: str, ended: Ended) -> Job:
        """Records how a running job's work ended. A finished product is the publisher's from now on, unless the job was
        to be cancelled."""

        def changes(job: Job) -> Changes:
            if job.state is not JobState.RUNNING:
                return {}
            if ended.state is not JobState.PUBLISHING:
                return _ended(ended.state, ended.reason, ended.message)
            if job.cancel_requested:
                return _ended(JobState.CANCELLED)
            return {
                "state": JobState.PUBLISHING,
                "phase": "publishing",
                "fraction": PUBLISHING_FRACTION,
                "failure_reason": "",
                "failure_message": "",
            }

        return self._change(calibration_id, changes)

    def record_interruption(self, calibration_id: str, how: str, *, is_death: bool) -> Job:
        """Records that the job's process ended without a result: the job is cancelled if that was requested, failed
        after more than MAX_RESUMES deaths, else queued again.

        `how`: a description for people. `is_death`: the process died by itself; False if its service stopped it or was
        killed.
        """

        def changes(job: Job) -> Changes:
            if job.state is not JobState.RUNNING:
                return {}
            if job.cancel_requested:
                return _ended(JobState.CANCELLED)
            if is_death and job.num_deaths >= MAX_RESUMES:
                return _ended(
                    JobState.FAILED,
                    "JOB_PROCESS_DIED",
                    f"the job's process died {job.num_deaths + 1} times, the last time {how}",
                )
            num_deaths = job.num_deaths + is_death
            return {"state": JobState.QUEUED, "phase": "", "num_deaths": num_deaths}

        return self._change(calibration_id, changes)

    # What becomes of a product, recorded by the publisher.

    def resume_waiting(self) -> None:
        """Lets all waiting jobs be published again, because the service has been restarted."""
        for job in self.in_state(JobState.WAITING):
            self.retry(job.calibration_id)

    def begin_publishing(self, calibration_id: str) -> bool:
        """Records that the registry may have the product from now on.
        False if the job is cancelled: then it must not get it."""

        def changes(job: Job) -> Changes:
            is_first = job.state is JobState.PUBLISHING and not job.publishing
            return {"publishing": True} if is_first and not job.cancel_requested else {}

        job = self._change(calibration_id, changes)
        return job.state is JobState.PUBLISHING and not job.cancel_requested

    def record_attempt(self, calibration_id: str, reason: str, message: str, *, is_waiting: bool) -> None:
        """Records why the product is not published. `is_waiting`: until somebody asks for the next attempt."""

        def changes(job: Job) -> Changes:
            if job.state is not JobState.PUBLISHING:
                return {}
            # A request to cancel that came meanwhile is dealt with first.
            waits = is_waiting and not job.cancel_requested
            state = JobState.WAITING if waits else JobState.PUBLISHING
            return {"state": state, "failure_reason": reason, "failure_message": message}

        self._change(calibration_id, changes)

    def end_publishing(self, calibration_id: str, published: PublishedVersion | None, *, is_lost: bool = False) -> Job:
        """Ends a job with the version that the registry has, or, if it has none, as cancelled, or as failed if the
        product `is_lost`. Leaves one that has ended as it is."""

        def changes(job: Job) -> Changes:
            if job.state is not JobState.PUBLISHING:
                return {}
            if published is not None:
                digest = published.manifest_digest
                version = {"router_version": published.version, "manifest_digest": digest}
                return {"fraction": 1.0, **version, **_ended(JobState.SUCCEEDED)}
            if is_lost:
                return _ended(
                    JobState.FAILED,
                    "PRODUCT_LOST",
                    "its finished product was removed or damaged before it was published",
                )
            return _ended(JobState.CANCELLED)

        return self._change(calibration_id, changes)

    def _change(self, calibration_id: str, changes_of: Callable[[Job], Changes]) -> Job:
        """Makes the changes that are due to the job as it is now, and returns it as it is then.
        Raises NotFound, what `changes_of` raises."""
        with self.database.transaction() as connection:
            job = self.get(calibration_id)
            changes = changes_of(job)
            if not changes:
                return job
            columns = "".join(f"{name} = ?, " for name in changes)
            connection.execute(
                f"UPDATE jobs SET {columns}revision = revision + 1 WHERE calibration_id = ?",
                (*changes.values(), calibration_id),
            )
            job = self.get(calibration_id)
            if job.state.has_ended:
                # Nobody runs it again.
                connection.execute("DELETE FROM job_prompts WHERE calibration_id = ?", (calibration_id,))
        self._on_change()
        return job


def _ended(state: JobState, reason: str = "", message: str = "") -> Changes:
    failure = {"failure_reason": reason, "failure_message": message}
    return {"state": state, "phase": "", "end_time_s": time.time(), **failure}


def _remove_ended(connection: Connection, which: str, limit: float) -> int:
    """Removes the records of the ended jobs that meet `which` and returns their number."""
    which = f"{which} AND state IN ('succeeded', 'failed', 'cancelled')"
    connection.execute(
        f"INSERT INTO removed_jobs SELECT model_id, sum(num_resumes) FROM jobs WHERE {which} GROUP BY model_id"
        " ON CONFLICT (model_id) DO UPDATE SET num_resumes = num_resumes + excluded.num_resumes",
        (limit,),
    )
    return connection.execute(f"DELETE FROM jobs WHERE {which}", (limit,)).rowcount
