"""The bounds of policy relaxed that a router publishes, and whether they hold for a model as it is loaded here."""

from collections.abc import Mapping
from typing import Any

from shared.ladder.risk import RISK_KEYS, PublishedRisk, Setting
from shared.model.dtypes import dtype_name
from shared.model.loaded import LoadedModel


def bounds_that_hold(manifest: Mapping[str, Any], loaded: LoadedModel) -> dict[Setting, PublishedRisk]:
    """The bounds on thresholds, on margins or on both that hold for this model. Raises `Corrupt`."""
    return {s: risk for s, risk in published_bounds(manifest).items() if holds_for(risk, loaded)}


def published_bounds(manifest: Mapping[str, Any]) -> dict[Setting, PublishedRisk]:
    """All bounds of a router's manifest. Raises `Corrupt`."""
    bounds = {setting: PublishedRisk.of(manifest, setting) for setting in RISK_KEYS}
    return {setting: risk for setting, risk in bounds.items() if risk is not None}


def holds_for(risk: PublishedRisk, loaded: LoadedModel) -> bool:
    """Whether the bounds were certified with this model's dtypes, on this type of device."""
    return risk.holds_in(*arithmetic(loaded))


def arithmetic(loaded: LoadedModel) -> tuple[str, str, str]:
    """(dtype of keys and values, dtype of matmuls, type of device), by name."""
    return dtype_name(loaded.kv_dtype), dtype_name(loaded.compute_dtype), loaded.device.type
