"""Publishes finished products in a thread of the service, beside the queue: the next job need not wait for a registry
that is away.

No error of the registry ends a job. After one that may pass, publishing is repeated, ever more slowly. After any other
the job waits, visibly, until somebody asks for the next attempt or the service is started again. Whatever happened, the
product stays on disk until its version is recorded, or until the job was cancelled and the registry has been seen not
to have it.
"""

import random
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import structlog

from calibrator_service.job import Job, JobState
from calibrator_service.job_process import JobFolder
from calibrator_service.jobs import JobStore
from calibrator_service.judge.judge import Judge
from calibrator_service.metrics import CalibratorMetrics
from calibrator_service.recipe import Product, load_product
from calibrator_service.service_thread import ServiceThread
from shared.errors import NeapError, PreconditionFailed
from shared.files import storage_error
from shared.registry.base import PublishedVersion
from shared.registry.contents import failed_checks
from shared.registry.factory import open_registry

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0

log = structlog.get_logger("neap.calibration")


@dataclass
class _Attempts:
    """The failed attempts at one product since this service started, and when (monotonic) the next is due."""

    num_failed: int = 0
    due_s: float = 0.0

    def fail(self) -> None:
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.num_failed, 30))
        self.num_failed += 1
        self.due_s = time.monotonic() + pause_s * random.uniform(0.5, 1.0)


class Publisher:
    """Safe to use from several threads. `thread`: a step makes all attempts that are due.
    What is cut off the next service repeats. `signs_later` and `judge`: see `publish`."""

    def __init__(
        self,
        folder: JobFolder,
        store: JobStore,
        registry: str,
        metrics: CalibratorMetrics,
        *,
        signs_later: bool = False,
        judge: Judge | None = None,
    ) -> None:
        self._folder = folder
        self._store = store
        self._registry = registry
        self._metrics = metrics
        self._signs_later = signs_later
        self._judge = judge
        self._has_resumed = False
        self._attempts: dict[str, _Attempts] = {}
        self.thread = ServiceThread("publications", self._publish_due)

    def hurry(self, calibration_id: str) -> None:
        """Makes the next attempt at the job's product due now."""
        self._attempts.pop(calibration_id, None)
        self.thread.wake()

    def _publish_due(self) -> float | None:
        """Makes all attempts that are due. Returns the seconds until the next, None if no product is left.

        Raises what the job store raises. What was published then is found again by the next attempt.
        """
        if not self._has_resumed:
            self._store.resume_waiting()
            self._has_resumed = True
        due_s = []
        for job in self._store.in_state(JobState.PUBLISHING):
            if self.thread.stopping.is_set():
                break
            attempts = self._attempts.setdefault(job.calibration_id, _Attempts())
            if attempts.due_s <= time.monotonic():
                self._attempt(job, attempts)
            due_s.append(attempts.due_s)
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _attempt(self, job: Job, attempts: _Attempts) -> None:
        """Raises what the job store raises."""
        try:
            self._settle(job)
            return
        except NeapError as known:
            error = known
        except OSError as unknown:
            error = storage_error(unknown, "its product", place="the calibration's folder")
        except Exception:
            log.exception("cannot be published", calibration_id=job.calibration_id)
            error = NeapError(f"internal error; the service's log has it under {job.calibration_id}")
        attempts.fail()
        log.warning(
            "not published yet",
            calibration_id=job.calibration_id,
            reason=error.reason,
            num_failed=attempts.num_failed,
            is_repeated=error.may_pass,
        )
        self._store.record_attempt(job.calibration_id, error.reason, error.message, is_waiting=not error.may_pass)

    def _settle(self, job: Job) -> None:
        """Ends the job, or returns because it was cancelled in this moment.
        Raises what registry and store raise, OSError."""
        product, published = None, None
        if not job.cancel_requested:
            product = load_product(self._folder.work(job.calibration_id))
        if product is not None:
            if not self._store.begin_publishing(job.calibration_id):
                return
            asked = job.model_id, job.calibration_id, job.message.aliases
            published = publish(self._registry, *asked, product, self._signs_later, self._judge)
        elif job.publishing:
            published = find_published(self._registry, job)
        is_lost = product is None and not job.cancel_requested
        after = self._store.end_publishing(job.calibration_id, published, is_lost=is_lost)
        log.info(
            "published" if published else "not published",
            calibration_id=job.calibration_id,
            state=after.state,
            version=after.router_version,
            manifest_digest=after.manifest_digest,
        )
        self._metrics.count_ended_job(after)
        shutil.rmtree(self._folder.work(job.calibration_id), ignore_errors=True)
        self._attempts.pop(job.calibration_id, None)


def publish(
    registry: str,
    model_id: str,
    calibration_id: str,
    asked_aliases: Sequence[str],
    product: Product,
    signs_later: bool = False,
    judge: Judge | None = None,
) -> PublishedVersion:
    """Publishes once and returns the version. Raises what the registry raises; then the version may be published all
    the same.

    The job's id is the request's id, so a repetition finds what an earlier attempt published. `signs_later`: routers
    must be signed, which the service cannot do, so that no alias is moved. With a `judge` aliases that exist are not
    moved, but get the version on trial.
    """
    failed = failed_checks(product.manifest)
    if failed:
        # It is published for inspection, and can be reached by its version number only.
        log.warning("the router did not pass its checks: no alias is moved", failed=failed)
    with closing(open_registry(registry)) as opened:
        aliases = () if failed or signs_later else asked_aliases
        known = opened.find_publication(model_id, calibration_id)
        # What an earlier attempt has pointed at the version is not put on trial.
        tried = [alias for alias in aliases if judge and opened.aliases(model_id).get(alias, 0) not in _new(known)]
        published = opened.publish(
            model_id,
            product.manifest,
            product.blobs,
            request_id=calibration_id,
            aliases=[alias for alias in aliases if alias not in tried],
            actor="calibration",
        )
    for alias in tried:
        assert judge is not None
        try:
            judge.begin(model_id, alias, published.version, f"calibration {calibration_id}")
        except PreconditionFailed as error:  # another version is on trial, or an operator's canary
            log.warning("not put on trial", alias=alias, version=published.version, reason=error.reason)
    return published


def _new(known: PublishedVersion | None) -> tuple[int, ...]:
    """What an alias names, 0 for none, where it needs no trial of the version."""
    return (0,) if known is None else (0, known.version)


def find_published(registry: str, job: Job) -> PublishedVersion | None:
    """The version that an attempt to publish has left in the registry. Raises what the registry raises."""
    with closing(open_registry(registry)) as opened:
        return opened.find_publication(job.model_id, job.calibration_id)
