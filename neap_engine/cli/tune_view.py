"""Shows the results of a sweep: sums per policy, as a table and as a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from neap_engine.cli.console import table_cell
from shared.errors import Corrupt

SIZE_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 110

# Name, threshold and margin.
Policy = tuple[str, float | None, float | None]


@dataclass(frozen=True)
class Row:
    """One policy over all prompts. `bound`: the certified share of answers that may differ from those of full; None if
    there is none.

    Speeds leave out each answer's first token, which the prompt's pass yields.
    """

    policy: str
    threshold: float | None
    margin: float | None
    bound: float | None
    num_answers: int
    num_differing: int
    num_tokens: int
    decode_s: float
    num_deep_passes: int

    @property
    def name(self) -> str:
        if self.margin is not None:
            return f"{self.policy}, margin {self.margin:g}"
        return self.policy if self.threshold is None else f"{self.policy} {self.threshold:g}"

    @property
    def share_differing(self) -> float:
        return self.num_differing / self.num_answers

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(self.num_deep_passes, 1)


def read_results(
    path: Path, thresholds: Sequence[float], margins: Sequence[float]
) -> tuple[dict[str, Any], list[Row]]:
    """The description of the run, and a row for full, for exact, and for relaxed at each threshold and margin, in this
    order."""
    wanted: list[Policy] = [("full", None, None), ("exact", None, None)]
    wanted += [("relaxed", value, None) for value in sorted(set(thresholds), reverse=True)]
    wanted += [("relaxed", None, value) for value in sorted(set(margins))]
    try:
        run, *records = [json.loads(line) for line in path.read_text().splitlines()]
        answers: dict[Policy, dict[int, Mapping[str, Any]]] = {}
        for record in records:
            policy = record["policy"], record["threshold"], record["margin"]
            answers.setdefault(policy, {})[record["prompt"]] = record
        full = {number: record["token_ids"] for number, record in answers[wanted[0]].items()}
        return run, [_row(key, answers[key], full) for key in wanted]
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{path} is not the file of a complete sweep") from error


def _row(
    key: Policy,
    records: Mapping[int, Mapping[str, Any]],
    full: Mapping[int, Sequence[int]],
) -> Row:
    return Row(
        policy=key[0],
        threshold=key[1],
        margin=key[2],
        bound=next(iter(records.values()))["bound"],
        num_answers=len(records),
        num_differing=sum(record["token_ids"] != full[n] for n, record in records.items()),
        num_tokens=sum(len(record["token_ids"]) - 1 for record in records.values()),
        decode_s=sum(record["decode_s"] for record in records.values()),
        num_deep_passes=sum(record["num_deep_passes"] for record in records.values()),
    )


def title(run: Mapping[str, Any]) -> str:
    return (
        f"{run['model_id']}, router version {run['router_version']}, {run['num_prompts']} prompts, "
        f"at most {run['max_tokens']} tokens"
    )


def bound_note(run: Mapping[str, Any]) -> str:
    """What the certified bounds are about."""
    tokens = run["bound_tokens"]
    part = f"for the first {tokens} tokens of greedy answers" if tokens else "for greedy answers"
    return f"certified: {part} to prompts like those of the calibration"


def sweep_table(run: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """The first row, full, is the baseline of answers and of speed."""
    has_bounds = any(row.bound is not None for row in rows)
    note = bound_note(run) if has_bounds else "the router certifies no bound at these settings"
    table = Table(
        "policy",
        "answers that differ",
        "certified\nat most",
        "tokens/s",
        "tokens per\ndeep pass",
        title=table_cell(title(run)),
        caption=table_cell(f"{note}. Machine: {run['machine']}"),
    )
    baseline = rows[0]
    for row in rows:
        speed_up = row.tokens_per_s / baseline.tokens_per_s if baseline.tokens_per_s else 0.0
        differing = f"{row.num_differing} of {row.num_answers} ({row.share_differing:.1%})"
        table.add_row(
            row.name,
            "baseline" if row is baseline else differing,
            "" if row.bound is None else f"{row.bound:.1%}",
            f"{row.tokens_per_s:.1f}" + ("" if row is baseline else f" ({speed_up:.2f}x)"),
            f"{row.tokens_per_pass:.2f}",
        )
    return table


def draw(path: Path, run: Mapping[str, Any], rows: Sequence[Row]) -> Path:
    """Writes a PNG, speed against the share of answers that differ, and returns its absolute path. Raises OSError."""
    # Imported here because it takes a second, which other commands need not spend. The Agg backend needs no display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=SIZE_INCHES)
    try:
        colours = {"full": "#999999", "exact": "#2a9d8f", "relaxed": "#e76f51"}
        for row in rows:
            share = 100 * row.share_differing
            if row.bound is not None:
                span = (share, 100 * row.bound)
                axes.plot(span, [row.tokens_per_s] * 2, color="#cccccc", marker="|", zorder=1)
            axes.scatter(share, row.tokens_per_s, color=colours[row.policy], zorder=2)
            place = (share, row.tokens_per_s)
            axes.annotate(row.name, place, xytext=(5, 4), textcoords="offset points", fontsize=8)
        axes.set_title(title(run), fontsize=9)
        axes.set_xlabel(
            "answers that differ from those of full, % (grey: up to the certified bound)"
        )
        axes.set_ylabel("tokens per second")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.1)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DOTS_PER_INCH)
    finally:
        pyplot.close(figure)
    return path.absolute()
