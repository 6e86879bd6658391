"""The records of jobs whose products are finished: what the publisher reads and writes in the store of jobs."""

from calibrator_service.job import Job, JobState
from calibrator_service.jobs import JobStore, change_job, end_job, fail_job
from shared.errors import PreconditionFailed
from shared.registry.base import PublishedVersion


class Publications:
    """Safe to use from several threads. Raises as the store does."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._database = store.database

    def retry(self, calibration_id: str) -> Job:
        """Lets a waiting job be published. Changes nothing for one that is being published. Raises NotFound, PreconditionFailed."""
        with self._database.transaction() as connection:
            job = self._store.get(calibration_id)
            if job.state is JobState.WAITING:
                change_job(connection, calibration_id, "state = 'publishing'")
            elif job.state is not JobState.PUBLISHING:
                raise PreconditionFailed(
                    f"calibration {calibration_id} has no product that waits to be published; it is {job.state}",
                    reason="NOTHING_TO_PUBLISH",
                )
            return self._store.get(calibration_id)

    def list_publishing(self) -> tuple[Job, ...]:
        """Jobs whose products are to be published, or whose publication is to be found out about."""
        return self._store.in_state(JobState.PUBLISHING)

    def resume_waiting(self) -> None:
        """Lets all waiting jobs be published again, because the service has been restarted."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE jobs SET state = 'publishing', revision = revision + 1 WHERE state = 'waiting'"
            )

    def begin_publishing(self, calibration_id: str) -> bool:
        """Records that the registry may have the product from now on. False if the job is cancelled: then it must not get it."""
        with self._database.transaction() as connection:
            job = self._store.get(calibration_id)
            if job.state is not JobState.PUBLISHING or job.cancel_requested:
                return False
            if not job.publishing:
                change_job(connection, calibration_id, "publishing = 1")
            return True

    def record_attempt(
        self, calibration_id: str, reason: str, message: str, *, is_waiting: bool
    ) -> None:
        """Records why the product is not published. `is_waiting`: until somebody asks for the next attempt."""
        with self._database.transaction() as connection:
            job = self._store.get(calibration_id)
            if job.state is not JobState.PUBLISHING:
                return
            # A request to cancel that came meanwhile is dealt with first.
            state = "waiting" if is_waiting and not job.cancel_requested else "publishing"
            changes = "state = ?, failure_reason = ?, failure_message = ?"
            change_job(connection, calibration_id, changes, state, reason, message)

    def end_publishing(self, calibration_id: str, published: PublishedVersion | None) -> Job:
        """Ends a job with the version that the registry has, or, if it has none, as cancelled. Leaves one that has ended as it is."""
        with self._database.transaction() as connection:
            if self._store.get(calibration_id).state is JobState.PUBLISHING:
                if published is not None:
                    change_job(
                        connection,
                        calibration_id,
                        "fraction = 1, router_version = ?, manifest_digest = ?, failure_reason = '', failure_message = ''",
                        published.version,
                        published.manifest_digest,
                    )
                end_job(
                    connection,
                    calibration_id,
                    JobState.CANCELLED if published is None else JobState.SUCCEEDED,
                )
            return self._store.get(calibration_id)

    def lose_product(self, calibration_id: str) -> Job:
        """Ends a job whose product is no longer on disk and that the registry does not have. Leaves one that has ended as it is."""
        with self._database.transaction() as connection:
            if self._store.get(calibration_id).state is JobState.PUBLISHING:
                message = "its finished product was removed or damaged before it was published"
                fail_job(connection, calibration_id, "PRODUCT_LOST", message)
            return self._store.get(calibration_id)
