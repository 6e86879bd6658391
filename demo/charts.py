"""Draws the demo's picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.figures import PolicyFigures
from neap_engine.cli.evaluate_view import write_panels

SIZE_INCHES = (15.0, 4.6)


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

    return write_panels(path, title, len(stories), draw, SIZE_INCHES)


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
