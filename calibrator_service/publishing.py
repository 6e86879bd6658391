"""Publishes a job's product. While the registry is unavailable, publishing waits, so that no finished calibration is lost."""

from collections.abc import Callable
from typing import TypeVar

import structlog
from tenacity import RetryCallState, Retrying, retry_if_exception
from tenacity.stop import stop_after_delay
from tenacity.wait import wait_random_exponential

from calibrator_service.jobs import JobStore
from calibrator_service.process_config import ProcessConfig
from calibrator_service.recipe import Product
from shared.errors import Unavailable
from shared.registry.base import PublishedVersion
from shared.registry.contents import failed_checks
from shared.registry.factory import open_registry

PATIENCE_S = 900.0
LONGEST_PAUSE_S = 10.0
# A server that does not answer may recover by itself. A folder without write access or a refused password does not.
_TRANSIENT = {"REDIS_UNAVAILABLE", "OBJECT_STORE_UNAVAILABLE", "REGISTRY_BUSY", "INDEX_LOST"}

T = TypeVar("T")
log = structlog.get_logger("neap.calibration")


def publish(config: ProcessConfig, store: JobStore, product: Product) -> PublishedVersion:
    """Publishes and returns the version. Safe to repeat, because the job's id is the request id. Raises what registry and store raise."""
    job = store.get(config.calibration_id)

    def check_not_cancelled() -> None:
        # A job can be cancelled until publishing begins, also while it waits for the registry.
        store.check_not_cancelled(config.calibration_id, config.start)

    failed = failed_checks(product.manifest)
    if failed:
        # It is published for inspection, and can be reached by its version number only.
        log.warning("the router did not pass its checks: no alias is moved", failed=failed)
    registry = _with_retries(lambda: open_registry(config.registry), check_not_cancelled)
    try:
        store.begin_publishing(job.calibration_id, config.start)
        published = _with_retries(
            lambda: registry.publish(
                job.model_id,
                product.manifest,
                product.blobs,
                request_id=job.calibration_id,
                aliases=() if failed else job.aliases,
                actor="calibration",
            ),
            lambda: None,
        )
    finally:
        registry.close()
    log.info("published", version=published.version, manifest_digest=published.manifest_digest)
    return published


def _with_retries(call: Callable[[], T], before_pause: Callable[[], None]) -> T:
    """Repeats `call` for up to PATIENCE_S while it fails with a transient error."""

    def on_pause(state: RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception()
        log.warning("the registry is unavailable", reason=getattr(error, "reason", ""))
        before_pause()

    attempts = Retrying(
        retry=retry_if_exception(_is_transient),
        wait=wait_random_exponential(max=LONGEST_PAUSE_S),
        stop=stop_after_delay(PATIENCE_S),
        before_sleep=on_pause,
        reraise=True,
    )
    return attempts(call)


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, Unavailable) and error.reason in _TRANSIENT
