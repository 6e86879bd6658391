"""Publishes a job's product in a registry. The job's id is the request's id, so a repetition finds what an earlier attempt published."""

from contextlib import closing

import structlog

from calibrator_service.job import Job
from calibrator_service.recipe import Product
from shared.registry.base import PublishedVersion
from shared.registry.contents import failed_checks
from shared.registry.factory import open_registry

log = structlog.get_logger("neap.calibration")


def publish(registry: str, job: Job, product: Product) -> PublishedVersion:
    """Publishes once and returns the version. Raises what the registry raises; then the version may be published all the same."""
    failed = failed_checks(product.manifest)
    if failed:
        # It is published for inspection, and can be reached by its version number only.
        log.warning("the router did not pass its checks: no alias is moved", failed=failed)
    with closing(open_registry(registry)) as opened:
        return opened.publish(
            job.model_id,
            product.manifest,
            product.blobs,
            request_id=job.calibration_id,
            aliases=() if failed else job.aliases,
            actor="calibration",
        )


def find_published(registry: str, job: Job) -> PublishedVersion | None:
    """The version that an attempt to publish has left in the registry. Raises what the registry raises."""
    with closing(open_registry(registry)) as opened:
        return opened.find_publication(job.model_id, job.calibration_id)
