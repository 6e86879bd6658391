"""Formats aliases, canaries and alias changes for display, and parses the share of a canary."""

from collections.abc import Iterable
from typing import Any

from shared.errors import InvalidInput


def aliases_by_version(aliases: Iterable[Any]) -> dict[int, list[str]]:
    """Map each version to the names of its aliases, in order. A canary's name carries its share: "stable:10%"."""
    names: dict[int, list[str]] = {}
    for alias in aliases:
        names.setdefault(alias.version, []).append(alias.name)
        if alias.HasField("canary"):
            share = percent_text(alias.canary.share_per_mille)
            names.setdefault(alias.canary.version, []).append(f"{alias.name}:{share}")
    return names


def describe_change(change: Any) -> str:
    """Describe an AliasChange in one line."""
    before = str(change.from_version) if change.HasField("from_version") else "nothing"
    line = f"{change.alias}: {before} -> {change.to_version}"
    if before == str(change.to_version):
        line = f"{change.alias}: {before}"
        line += "" if change.HasField("canary") else ", no canary"
    return f"{line}, {canary_text(change.canary)}" if change.HasField("canary") else line


def canary_text(canary: Any) -> str:
    return f"{percent_text(canary.share_per_mille)} to {canary.version}"


def percent_text(per_mille: int) -> str:
    return f"{per_mille / 10:g}%"


def share_per_mille(text: str) -> int:
    """Parse "10%" or "2.5%" to thousandths in [1, 1000].

    The service decides whether it accepts the number. Raises InvalidInput (BAD_SHARE).
    """
    number = text.strip()
    try:
        scaled = 10 * float(number.removesuffix("%"))
    except ValueError:
        scaled = -1.0
    if not number.endswith("%") or not 0 < scaled <= 1000 or abs(scaled - round(scaled)) > 1e-9:
        raise InvalidInput(
            f"the share {text!r} is invalid: give a percentage in steps of 0.1, such as 2.5%", reason="BAD_SHARE"
        )
    return round(scaled)
