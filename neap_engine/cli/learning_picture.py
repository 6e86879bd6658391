"""Draws how fast a system was: tokens per second over time, an alias' versions as marks, its canaries as bands."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neap_engine.cli.evaluate_view import write_panels
from shared.registry.base import AliasChange

SIZE_INCHES = (9.0, 4.2)
BAND, MARK = "#e9c46a", "#264653"
# Points on each side of the one whose place on the line is the median of all of them.
BESIDE = 2
# What the axis counts, and from how many seconds on.
UNITS = (("days", 86_400.0, 172_800.0), ("hours", 3600.0, 7200.0), ("seconds", 1.0, 0.0))


@dataclass(frozen=True)
class Line:
    """`points`: Unix seconds and tokens per second. Lines of one label are one in the legend."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]


def draw(
    path: Path,
    title: str,
    lines: Sequence[Line],
    changes: Sequence[AliasChange],
    began_s: float,
    words: Callable[[int], str],
) -> Path:
    """Write a picture of the form that the name ends with, and return its absolute path. `changes`: of the alias, in
    their order. `began_s`: Unix seconds at the left end. `words`: beside the mark of a version, 0 for none. Raises
    OSError, and ValueError for an unknown form."""
    import matplotlib  # takes a second

    last_s = max((at_s for line in lines for at_s, _ in line.points), default=began_s)
    unit, unit_s = next((name, long_s) for name, long_s, least_s in UNITS if last_s - began_s >= least_s)

    def place(at_s: float) -> float:
        return max(at_s - began_s, 0.0) / unit_s

    def draw_in(axes: Any) -> None:
        for line in lines:
            _draw_line(axes, line, place)
        top = 1.35 * max((speed for line in lines for _, speed in line.points), default=1.0)
        axes.set_ylim(0, top)
        axes.set_xlim(left=0)
        earlier = [change.to_version for change in changes if change.change_time_s <= began_s]
        later = [
            (place(move.change_time_s), move.to_version) for move in moves(changes) if move.change_time_s > began_s
        ]
        for at, version in [(0.0, earlier[-1] if earlier else 0), *later]:
            axes.axvline(at, color=MARK, linewidth=1, linestyle="--")
            axes.text(at, 0.98 * top, words(version), va="top", color=MARK)
        for first, last, version in canaries(changes):
            end = axes.get_xlim()[1] if last is None else place(last.change_time_s)
            axes.axvspan(place(first.change_time_s), end, color=BAND, alpha=0.35, label=f"canary: router {version}")
        axes.set_xlabel(f"{unit} after the start")
        axes.set_ylabel("tokens per second of an answer")
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # one of each label
        axes.legend(handles.values(), handles.keys(), loc="lower right", ncols=min(max(len(handles), 1), 5))

    matplotlib.rcParams["svg.fonttype"] = "none"  # text remains text
    return write_panels(path, title, 1, draw_in, SIZE_INCHES)


def _draw_line(axes: Any, line: Line, place: Callable[[float], float]) -> None:
    times, speeds = [place(at_s) for at_s, _ in line.points], [speed for _, speed in line.points]
    axes.scatter(times, speeds, s=12, alpha=0.5, color=line.colour)
    medians = [statistics.median(speeds[max(n - BESIDE, 0) : n + BESIDE + 1]) for n in range(len(speeds))]
    axes.plot(times, medians, color=line.colour, label=line.label)


def moves(changes: Sequence[AliasChange]) -> Iterator[AliasChange]:
    """Those after which the alias names another version."""
    return (change for change in changes if change.from_version != change.to_version)


def canaries(changes: Sequence[AliasChange]) -> Iterator[tuple[AliasChange, AliasChange | None, int]]:
    """Of each canary the change that began it, the one that ended it (None: none has), and its version."""
    first, version = None, 0
    for change in changes:
        now = change.canary.version if change.canary else 0
        if first is not None and now != version:
            yield first, change, version
            first = None
        if first is None and now:
            first, version = change, now
    if first is not None:
        yield first, None, version


def router_name(version: int) -> str:
    return f"router {version}" if version else "no router"
