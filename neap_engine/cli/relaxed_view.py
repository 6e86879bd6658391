"""Prints how often answers by the policy relaxed differed from the full model's, as a router's manifest says it."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from neap_engine.cli.console import out, print_line, table_cell

SETTINGS = ("margin", "threshold")


def print_relaxed(manifest: Mapping[str, Any]) -> None:
    """Print what was counted on held-out prompts, as a table. Where nothing was, print that."""
    figures: Mapping[str, Any] = manifest.get("calibration", {}).get("relaxed", {})
    if not figures.get("num_answers"):
        print_line("  relaxed: not measured for this router; it is lossy")
        return
    table = Table(
        "relaxed (lossy)",
        "answers that differ from full's",
        "tokens that differ",
        caption=table_cell(
            f"{figures['num_answers']} held-out prompts, greedy, the first {figures['max_new_tokens']} tokens; "
            f"{figures['confidence']:.0%} {figures['interval'].capitalize()} intervals"
        ),
    )
    for row in figures["settings"]:
        name = next(name for name in SETTINGS if name in row)
        share = row["num_tokens_differing"] / max(row["num_tokens"], 1)
        table.add_row(
            f"{name} {row[name]:g}",
            f"{row['num_differing']} of {figures['num_answers']} ({row['low']:.1%} to {row['high']:.1%})",
            f"{share:.2%} ({row['token_low']:.2%} to {row['token_high']:.2%})",
        )
    out.print(table)
