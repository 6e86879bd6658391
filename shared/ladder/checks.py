"""What a router must pass before an alias may name it, recorded in its manifest as {name: {"passed", "detail"}}."""

import math
from collections.abc import Mapping
from typing import Any

from shared.errors import NeapError
from shared.ladder.artefact import unpack_ladder

# A router that always gave the share of agreement would have the Brier score share * (1 - share). Held-out sets of short
# calibrations are small, hence the slack.
BRIER_SLACK = 0.05


def check_packed(
    manifest: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> dict[str, dict[str, Any]]:
    """`unpacks`: what a worker will do with these bytes works. `figures`: all are numbers. `routers`: each router's held-out
    Brier score is no worse than that of always giving the rung's share of agreement; rungs without figures have nothing to say.
    """
    rungs = [(str(rung["name"]), rung.get("figures", {})) for rung in manifest["rungs"]]
    numbers = [
        (f"{name}.{key}", value)
        for name, figures in rungs
        for key, value in figures.items()
        if isinstance(value, int | float)
    ]
    broken = [name for name, value in numbers if not math.isfinite(value)]
    worse = [name for name, figures in rungs if figures and _is_worse_than_guessing(figures)]
    return {
        "unpacks": _unpacks(manifest, blobs),
        "figures": _check(broken),
        "routers": _check(worse),
    }


def _unpacks(manifest: Mapping[str, Any], blobs: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        found = set(unpack_ladder(manifest, blobs).rung_names)
    except NeapError as error:
        return _check([error.reason])
    return _check(sorted({str(rung["name"]) for rung in manifest["rungs"]} ^ found))


def _is_worse_than_guessing(figures: Mapping[str, Any]) -> bool:
    if "router_brier" not in figures or "agreement_when_proposed" not in figures:
        return False
    share = float(figures["agreement_when_proposed"])
    return float(figures["router_brier"]) > share * (1 - share) + BRIER_SLACK


def _check(wrong: list[str]) -> dict[str, Any]:
    return {"passed": not wrong, "detail": ", ".join(wrong)}
