"""Draws the picture of `neap demo` and `neap report`: exits per depth, reliability of the routers, tokens per second by policy."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.cli.measure import PolicyFigures

SIZE_INCHES = (15.0, 4.6)
DOTS_PER_INCH = 110


def write_report(
    path: Path,
    *,
    title: str,
    num_layers: int,
    figures: Sequence[PolicyFigures],
    manifest_json: str,
) -> Path:
    """Write the PNG and return its absolute path. The first of `figures` is the baseline. Raises OSError."""
    # Imported here because it takes a second, which other commands need not spend. The Agg backend needs no display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=SIZE_INCHES)
    try:
        figure.suptitle(title)
        draw_exits(left, figures[-1], num_layers)
        draw_reliability(middle, reliability(json.loads(manifest_json)))
        draw_speed(right, figures)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS_PER_INCH)
    finally:
        pyplot.close(figure)
    return path.absolute()


def draw_exits(axes: Any, entry: PolicyFigures, num_layers: int) -> None:
    """Draw the number of tokens per rung, the shallowest rung first."""
    ordered = sorted(entry.exits.items(), key=lambda item: (item[0][1], item[0][0]))
    names = [f"{rung}\n{depth}/{num_layers}" for (rung, depth), _ in ordered]
    bars = axes.bar(names, [count for _, count in ordered], color="#2a9d8f")
    axes.bar_label(bars)
    axes.set_title(f"tokens by the rung they left at ({entry.policy})")
    axes.set_ylabel("tokens")


def draw_reliability(axes: Any, rungs: Mapping[str, Sequence[tuple[float, float, int]]]) -> None:
    """Plot observed against predicted agreement per rung. The area of a dot grows with the number of tokens in its bin."""
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
    for name, bins in rungs.items():
        filled = [entry for entry in bins if entry[2] > 0]
        total = sum(count for _, _, count in filled) or 1
        predicted, observed = [entry[0] for entry in filled], [entry[1] for entry in filled]
        (line,) = axes.plot(predicted, observed, linewidth=1, label=name)
        sizes = [10 + 300 * count / total for _, _, count in filled]
        axes.scatter(predicted, observed, s=sizes, alpha=0.6, color=line.get_color())
    if rungs:
        axes.legend(fontsize="small")
    else:
        axes.text(0.5, 0.5, "the manifest has no reliability bins", ha="center", va="center")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_title("routers on held-out tokens")
    axes.set_xlabel("router's probability of agreement")
    axes.set_ylabel("observed agreement")


def draw_speed(axes: Any, figures: Sequence[PolicyFigures]) -> None:
    bars = axes.bar(
        [entry.policy for entry in figures],
        [entry.tokens_per_s for entry in figures],
        color=["#999999", "#2a9d8f", "#e9c46a"][: len(figures)],
    )
    axes.bar_label(bars, fmt="%.1f")
    axes.set_title("decoding speed by policy")
    axes.set_ylabel("tokens per second")


def reliability(manifest: Mapping[str, Any]) -> dict[str, list[tuple[float, float, int]]]:
    """Read the reliability bins of each rung from a manifest: (mean probability, observed agreement, number of tokens)."""
    rungs: dict[str, list[tuple[float, float, int]]] = {}
    for rung in manifest["rungs"]:
        bins = rung.get("figures", {}).get("reliability", [])
        if bins:
            rungs[str(rung["name"])] = [
                (float(entry["probability"]), float(entry["agreement"]), int(entry["count"]))
                for entry in bins
            ]
    return rungs
