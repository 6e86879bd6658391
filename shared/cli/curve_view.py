"""Prints what more text is worth: how often exits that learned from parts of the text agree with the full model."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from shared.cli.console import out, print_line, table_cell

PLACES = (1, 2, 3, 4)


def print_curve(manifest: Mapping[str, Any]) -> None:
    """Print the learning curve in a manifest as a table; nothing if there is none. The calibration's report defines its form."""
    entries = manifest.get("calibration", {}).get("learning_curve", [])
    try:
        rows = [row for entry in entries for row in _rows(entry)]
    except (AttributeError, KeyError, TypeError, ValueError):
        print_line("  the manifest's learning curve cannot be read")
        return
    if not rows:
        return
    table = Table(
        *("exit", "tokens", "drafts", *(f"{place}." for place in PLACES)),
        title="learned from so many tokens, drafts that are the full model's choice",
        caption="by their place in a chain of drafts; hard: where the tables' draft is wrong or missing",
    )
    for name, *cells in rows:
        table.add_row(table_cell(name), *cells)
    out.print(table)


def _rows(entry: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, figures in entry["exits"].items():
        for kind, ending in (("all", ""), ("hard", "_beside_tables")):
            shares = [f"{figures[f'agreement_{place}{ending}']:.3f}" for place in PLACES]
            rows.append([name, f"{entry['tokens']:,d}", kind, *shares])
    return rows
