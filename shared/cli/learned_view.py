"""Says in words what a calibration learned from, and how often its rungs were right on text that it had not learned from."""

from collections.abc import Iterator, Mapping
from typing import Any

from shared.cli.console import print_line

# Shares of fewer tokens may be chance.
LEAST_MEASURED = 200


def print_learned(manifest: Mapping[str, Any]) -> None:
    """Print `learned_lines`, indented."""
    for line in learned_lines(manifest):
        print_line(f"  {line}")


def learned_lines(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a manifest says about a router's text and figures; nothing where it does not say it, or in another form."""
    tokens = _mapping(_mapping(manifest.get("calibration")).get("tokens"))
    total, measured = tokens.get("total"), tokens.get("report")
    if not isinstance(total, int) or not isinstance(measured, int):
        return
    yield f"learned from {total - measured:,} tokens"
    shares = [f"{name} {agreement:.0%}" for name, agreement in _agreements(manifest.get("rungs"))]
    if measured < LEAST_MEASURED:
        yield f"measured on {measured:,} tokens that it did not learn from: too few to say how often it guesses right"
    elif shares:
        yield f"guessed right, of {measured:,} tokens that it did not learn from: {', '.join(shares)}"


def _agreements(rungs: Any) -> Iterator[tuple[str, float]]:
    for rung in rungs if isinstance(rungs, list) else ():
        agreement = _mapping(_mapping(rung).get("figures")).get("agreement")
        if isinstance(agreement, float):
            yield str(rung.get("name")), agreement


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
