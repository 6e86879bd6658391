"""The bounds of policy relaxed that a router publishes, as far as they hold for a model as it is loaded here."""

import structlog

from shared.ladder.risk import RISK_KEYS, PublishedRisk, Setting
from shared.model.dtypes import dtype_name
from shared.model.loaded import LoadedModel
from shared.registry.base import PublishedVersion

log = structlog.get_logger("neap.routers")


def bounds_that_hold(published: PublishedVersion, loaded: LoadedModel) -> dict[Setting, PublishedRisk]:
    """The bounds on thresholds, on margins or on both that were certified with this model's dtypes, on this type of
    device. Logs the others. Raises `Corrupt`."""
    arithmetic = dtype_name(loaded.kv_dtype), dtype_name(loaded.compute_dtype), loaded.device.type
    bounds: dict[Setting, PublishedRisk] = {}
    for setting in RISK_KEYS:
        risk = PublishedRisk.of(published.manifest, setting)
        if risk is not None and risk.holds_in(*arithmetic):
            bounds[setting] = risk
        elif risk is not None:
            log.warning(
                "the router's bound does not hold here: it was certified with keys and values of another dtype, in "
                "another arithmetic, or on another device",
                model_id=loaded.model_id,
                version=published.version,
                bound_of=setting,
                certified=(risk.kv_dtype, risk.compute_dtype, risk.device),
                served=arithmetic,
            )
    return bounds
