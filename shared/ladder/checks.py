"""Checks that a router must pass before an alias may point to it.
The manifest records them as {name: {"passed", "detail"}}."""

import math
from collections.abc import Mapping
from typing import Any

from shared.errors import NeapError
from shared.ladder.artefact import unpack_ladder

# A confidence head that always gave the proposer's share of agreement would have a Brier score of share * (1 - share).
# Short calibrations have small held-out sets, so one may exceed that by this much.
BRIER_SLACK = 0.05


def check_artefact(manifest: Mapping[str, Any], blobs: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """The checks of a ladder's artefact, by name.

    `unpacks`: the bytes can be loaded as a worker would, and give the manifest's proposers. `figures`: all are finite.
    `confidence`: the held-out Brier score of each confidence head is no worse than that of always giving the share
    of agreement, plus BRIER_SLACK; proposers without figures pass.
    """
    proposers = [(str(proposer["name"]), proposer.get("figures", {})) for proposer in manifest["proposers"]]
    numbers = [
        (f"{name}.{key}", value)
        for name, figures in proposers
        for key, value in figures.items()
        if isinstance(value, int | float)
    ]
    broken = [name for name, value in numbers if not math.isfinite(value)]
    worse = [name for name, figures in proposers if figures and _is_worse_than_guessing(figures)]
    return {"unpacks": _unpacks(manifest, blobs), "figures": _check(broken), "confidence": _check(worse)}


def _unpacks(manifest: Mapping[str, Any], blobs: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        unpacked = set(unpack_ladder(manifest, blobs).proposer_names)
    except NeapError as error:
        return _check([error.reason])
    return _check(sorted({str(proposer["name"]) for proposer in manifest["proposers"]} ^ unpacked))


def _is_worse_than_guessing(figures: Mapping[str, Any]) -> bool:
    if "confidence_brier" not in figures or "agreement_when_proposed" not in figures:
        return False
    share = float(figures["agreement_when_proposed"])
    return float(figures["confidence_brier"]) > share * (1 - share) + BRIER_SLACK


def _check(wrong: list[str]) -> dict[str, Any]:
    return {"passed": not wrong, "detail": ", ".join(wrong)}
