"""Draws the picture of `neap report`, exits per depth, reliability of the routers and tokens per second, and that of
`neap demo`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neap_engine.cli.measure import PolicyFigures

SIZE_INCHES = (15.0, 4.6)
DOTS_PER_INCH = 110


def write_report(
    path: Path, *, title: str, num_layers: int, figures: Sequence[PolicyFigures], manifest_json: str
) -> Path:
    """Write the PNG and return its absolute path. The first of `figures` is the baseline. Raises OSError."""

    def draw(left: Any, middle: Any, right: Any) -> None:
        draw_exits(left, figures[-1], num_layers)
        draw_reliability(middle, reliability(json.loads(manifest_json)))
        draw_speed(right, figures)
        right.set_title("decoding speed by policy")

    return write_panels(path, title, 3, draw)


def write_stories(path: Path, *, title: str, stories: Mapping[str, Sequence[PolicyFigures]]) -> Path:
    """Write the PNG with the speeds of each story side by side and return its absolute path. `stories`: title of a
    panel -> its sides, the first of which is the baseline. Raises OSError."""

    def draw(*panels: Any) -> None:
        for axes, (name, figures) in zip(panels, stories.items(), strict=True):
            draw_speed(axes, figures)
            axes.set_title(name)
        top = max(axes.get_ylim()[1] for axes in panels)
        for axes in panels:
            axes.set_ylim(0, top)

    return write_panels(path, title, len(stories), draw)


def write_panels(
    path: Path, title: str, num_panels: int, draw: Callable[..., None], size_inches: tuple[float, float] = SIZE_INCHES
) -> Path:
    """Write a PNG of panels side by side, which `draw` gets as its arguments. Returns the absolute path.
    Raises OSError."""
    # Imported here because it takes a second, which other commands need not spend. The Agg backend needs no display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, num_panels, figsize=size_inches, squeeze=False)
    try:
        figure.suptitle(title)
        draw(*panels[0])
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
    axes.set_title(f"tokens by the rung they left at ({entry.name})")
    axes.set_ylabel("tokens")


def draw_reliability(axes: Any, rungs: Mapping[str, Sequence[tuple[float, float, int]]]) -> None:
    """Plot observed against predicted agreement per rung.
    The area of a dot grows with the number of tokens in its bin."""
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
    """Draw tokens per second of each side, and how many times that of the first it is."""
    bars = axes.bar(
        [entry.name for entry in figures],
        [entry.tokens_per_s for entry in figures],
        color=["#999999", "#2a9d8f", "#e9c46a"][: len(figures)],
    )
    labels = [f"{entry.tokens_per_s:.1f}" for entry in figures]
    labels[1:] = [
        f"{label}\n{entry.speed_up(figures[0]):.2f}x" for label, entry in zip(labels[1:], figures[1:], strict=True)
    ]
    axes.bar_label(bars, labels)
    axes.margins(y=0.2)
    axes.set_ylabel("tokens per second")


def reliability(manifest: Mapping[str, Any]) -> dict[str, list[tuple[float, float, int]]]:
    """Read the reliability bins of each rung from a manifest: (mean probability, observed agreement, number of
    tokens)."""
    rungs: dict[str, list[tuple[float, float, int]]] = {}
    for rung in manifest["rungs"]:
        bins = rung.get("figures", {}).get("reliability", [])
        if bins:
            rungs[str(rung["name"])] = [
                (float(entry["probability"]), float(entry["agreement"]), int(entry["count"])) for entry in bins
            ]
    return rungs
