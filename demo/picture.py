"""Draws what a system did: speeds of answers over time, versions as marks, canaries as bands."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from neap_client.router.v1.router_pb2 import AliasChange

from demo.answers import Measured, Pair, median_speed_up
from neap_engine.cli.evaluate_view import COLOURS, write_panels

SIZE_INCHES = (9.0, 4.2)
BAND, MARK = "#e9c46a", "#264653"
# Answers on each side of the one whose place on the line is the median of all of them.
BESIDE = 2


def draw(path: Path, title: str, pairs: Sequence[Pair], changes: Sequence[AliasChange], began_s: float) -> Path:
    """Write an SVG and return its absolute path. `changes`: of the alias, in their order. `began_s`: Unix seconds at
    the left end. Raises OSError."""
    import matplotlib  # takes a second

    timed = [pair for pair in pairs if pair.has_speed]

    def draw_in(axes: Any) -> None:
        _draw_speeds(axes, "full", [pair.full for pair in timed], began_s)
        for version in dict.fromkeys(pair.exact.version for pair in timed):
            _draw_speeds(axes, "exact", [pair.exact for pair in timed if pair.exact.version == version], began_s)
        top = 1.35 * max((pair.exact.tokens_per_s for pair in timed), default=1.0)
        axes.set_ylim(0, top)
        axes.set_xlim(left=0)
        for at_s, version in [(0.0, 0), *((seconds_of(move) - began_s, move.to_version) for move in moves(changes))]:
            own = [pair for pair in timed if pair.exact.version == version]
            words = f" router {version}" if version else " no router"
            words += f"\n exact {median_speed_up(own):.2f}x full" if own else ""
            axes.axvline(at_s, color=MARK, linewidth=1, linestyle="--")
            axes.text(at_s, 0.98 * top, words, va="top", color=MARK)
        for first, last, version in canaries(changes):
            end = axes.get_xlim()[1] if last is None else seconds_of(last) - began_s
            axes.axvspan(seconds_of(first) - began_s, end, color=BAND, alpha=0.35, label=f"canary: router {version}")
        axes.set_xlabel("seconds after the start")
        axes.set_ylabel("tokens per second of an answer")
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # one of each label
        axes.legend(handles.values(), handles.keys(), loc="lower right", ncols=len(handles))

    matplotlib.rcParams["svg.fonttype"] = "none"  # text remains text
    return write_panels(path, title, 1, draw_in, SIZE_INCHES)


def _draw_speeds(axes: Any, policy: str, answers: Sequence[Measured], began_s: float) -> None:
    times = [answer.ended_s - began_s for answer in answers]
    speeds = [answer.tokens_per_s for answer in answers]
    axes.scatter(times, speeds, s=12, alpha=0.5, color=COLOURS[policy])
    medians = [statistics.median(speeds[max(n - BESIDE, 0) : n + BESIDE + 1]) for n in range(len(speeds))]
    axes.plot(times, medians, color=COLOURS[policy], label=policy)


def seconds_of(change: AliasChange) -> float:
    """Unix seconds."""
    return float(change.change_time.seconds + change.change_time.nanos / 1e9)


def moves(changes: Sequence[AliasChange]) -> Iterator[AliasChange]:
    """Those after which the alias names another version."""
    return (change for change in changes if change.from_version != change.to_version)


def canaries(changes: Sequence[AliasChange]) -> Iterator[tuple[AliasChange, AliasChange | None, int]]:
    """For each canary the change that began it, the one that ended it (None: none has), and its version."""
    first: AliasChange | None = None
    for change in changes:
        version = change.canary.version if change.HasField("canary") else 0
        if first is not None and version != first.canary.version:
            yield first, change, first.canary.version
            first = None
        if first is None and version:
            first = change
    if first is not None:
        yield first, None, first.canary.version
