"""Shows what `neap evaluate` and `neap tune` have measured: tables, a CSV file, and pictures of quality and speed."""

import csv
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from neap_engine.cli.console import table_cell

SIZE_INCHES = (8.0, 5.0)
# A pass over several tokens takes no less than one over a single token, but for noise.
IMPOSSIBLE = 1.05
COLOURS = {"full": "#999999", "exact": "#2a9d8f", "relaxed": "#e76f51"}

# The fields of `neap_engine.evaluate.figures.Row`. The first row, full, is the baseline of answers and of speed.
Row = Mapping[str, Any]


def title(run: Mapping[str, Any]) -> str:
    return (
        f"{run['model_id']}, router version {run['router_version']}, {run['num_prompts']} prompts, "
        f"at most {run['max_tokens']} tokens"
    )


def evaluation_table(run: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    table = Table(
        "side",
        "tokens/s",
        "half of the\nprompts",
        "layers per\ntoken",
        "answers as\nfull's",
        "tokens full\nwould choose",
        "perplexity",
        "right",
        title=table_cell(title(run)),
        caption=table_cell(f"Greedy, one request at a time. Machine: {run['machine']}"),
    )
    for row in rows:
        table.add_row(table_cell(row["side"]), *_figures(row, rows[0]))
    return table


def notes(rows: Sequence[Row]) -> list[str]:
    """What stands below the table: why a side was not measured, and how many right answers are lost."""
    lines = [f"{row['side']}: {row['note']}" for row in rows if row["note"]]
    lines += [
        f"{row['side']}: {row['lost_low']:.1%} to {row['lost_high']:.1%} fewer right answers than full (95 % bootstrap "
        "interval)"
        for row in rows[1:]
        if row["num_checkable"]
    ]
    return lines


def _figures(row: Row, baseline: Row) -> list[str]:
    if not row["num_answers"]:
        return [""] * 7
    checkable = row["num_checkable"]
    return [
        *_speed(row),
        f"{row['layers_per_token']:.1f}",
        f"{row['num_identical']} of {row['num_answers']}",
        f"{row['chosen_share']:.1%}",
        f"{row['perplexity']:.3f}",
        f"{row['num_right']} of {checkable}" if checkable else "",
    ]


def _speed(row: Row) -> tuple[str, str]:
    """Tokens per second with the speed-up over prompts, and between what speed-ups half of the prompts have."""
    return f"{row['tokens_per_s']:.1f} ({row['speed_up']:.2f}x)", f"{row['speed_low']:.2f}x to {row['speed_high']:.2f}x"


def doubts(rows: Sequence[Row]) -> list[str]:
    """What in these figures cannot be, or differs much from prompt to prompt: something else used the machine."""
    lines = []
    for row in rows[1:]:
        if row["tokens_per_pass"] and row["speed_up"] > IMPOSSIBLE * row["tokens_per_pass"]:
            lines.append(
                f"warning: {row['side']} cannot be {row['speed_up']:.2f}x as fast at {row['tokens_per_pass']:.2f} "
                "tokens per pass: something else used the machine. Measure again, with more --rounds"
            )
    return lines


def policy_sweep_table(run: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    table = Table(
        "policy",
        "answers that differ",
        "tokens/s",
        "half of the\nprompts",
        "tokens per\nverify pass",
        title=table_cell(title(run)),
        caption=table_cell(f"relaxed is lossy. Greedy, one request at a time. Machine: {run['machine']}"),
    )
    for row in rows:
        differing = row["num_answers"] - row["num_identical"]
        table.add_row(
            row["side"],
            f"{differing} of {row['num_answers']} ({_share_differing(row):.1%})",
            *_speed(row),
            f"{row['tokens_per_pass']:.2f}",
        )
    return table


def _share_differing(row: Row) -> float:
    return float(1 - row["num_identical"] / row["num_answers"])


def write_csv(path: Path, rows: Sequence[Row]) -> Path:
    """Writes one line per side and returns the file's absolute path. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path.absolute()


def draw_sides(path: Path, run: Mapping[str, Any], rows: Sequence[Row]) -> Path:
    """Writes a PNG, the share of tokens that the full model would choose against speed. Returns its absolute path.
    Raises OSError."""

    def draw(axes: Any) -> None:
        measured = [row for row in rows if row["num_answers"]]
        for row, marker in zip(measured, itertools.cycle("osD^v<>PX*")):
            place = row["tokens_per_s"], 100 * row["chosen_share"]
            axes.scatter(*place, marker=marker, s=60, alpha=0.8, label=row["side"])
        axes.set_xlabel("tokens per second")
        axes.set_ylabel("tokens that the full model would choose, %")
        axes.set_xlim(left=0)
        axes.set_ylim(-2, 103)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)

    return write_panels(path, title(run), 1, draw, SIZE_INCHES)


def draw_policies(path: Path, run: Mapping[str, Any], rows: Sequence[Row]) -> Path:
    """Writes a PNG, speed against the share of answers that differ, and returns its absolute path. Raises OSError."""

    def draw(axes: Any) -> None:
        for row, marker in zip(rows, itertools.cycle("osD^v<>PX*")):
            share, policy = 100 * _share_differing(row), row["side"].replace(",", "").split()[0]
            place = share, row["speed_up"]
            axes.scatter(*place, marker=marker, s=60, alpha=0.8, color=COLOURS[policy], label=row["side"])
            axes.plot([share] * 2, [row["speed_low"], row["speed_high"]], color=COLOURS[policy], linewidth=1)
        axes.set_xlabel("answers that differ from those of full, %")
        axes.set_ylabel("times as fast as full (line: half of the prompts)")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.1)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)

    return write_panels(path, title(run), 1, draw, SIZE_INCHES)


DOTS_PER_INCH = 110


def write_panels(
    path: Path, title: str, num_panels: int, draw: Callable[..., None], size_inches: tuple[float, float]
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
