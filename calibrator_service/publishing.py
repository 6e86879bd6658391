"""The end of a job: its product goes to the registry, which may be away for a while without a calibration being lost."""

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
# A server that does not answer comes back; a folder that may not be written, or a refused password, does not by itself.
_PASSING = {"REDIS_UNAVAILABLE", "OBJECT_STORE_UNAVAILABLE", "REGISTRY_BUSY", "INDEX_LOST"}

T = TypeVar("T")
log = structlog.get_logger("neap.calibration")


def publish(config: ProcessConfig, store: JobStore, product: Product) -> PublishedVersion:
    """The version published. Safe to repeat: the job's id is the request's. Raises what the registry and the store raise."""
    job = store.get(config.calibration_id)

    def still_wanted() -> None:
        # Until publishing has begun, cancelling works: also while the registry is waited for.
        store.check_wanted(config.calibration_id, config.start)

    failed = failed_checks(product.manifest)
    if failed:
        # It is published to be looked at, under its number alone.
        log.warning("the router did not pass its checks: no alias is moved", failed=failed)
    registry = _patiently(lambda: open_registry(config.registry), still_wanted)
    try:
        store.begin_publishing(job.calibration_id, config.start)
        made = _patiently(
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
    log.info("published", version=made.version, manifest_digest=made.manifest_digest)
    return made


def _patiently(call: Callable[[], T], before_pause: Callable[[], None]) -> T:
    def pausing(state: RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception()
        log.warning("the registry is away", reason=getattr(error, "reason", ""))
        before_pause()

    attempts = Retrying(
        retry=retry_if_exception(_passes),
        wait=wait_random_exponential(max=LONGEST_PAUSE_S),
        stop=stop_after_delay(PATIENCE_S),
        before_sleep=pausing,
        reraise=True,
    )
    return attempts(call)


def _passes(error: BaseException) -> bool:
    return isinstance(error, Unavailable) and error.reason in _PASSING
