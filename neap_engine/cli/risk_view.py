"""Prints the certified bounds of the policy relaxed. `shared.ladder.risk` defines their form in the manifest."""

from collections.abc import Mapping
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb
from rich.table import Table

from neap_engine.cli.console import out, print_line, table_cell

# The manifest's key, the setting that its bounds are about, and which settings are safer.
TABLES = (("risk", "threshold", ">="), ("margin_risk", "margin", "<="))


def print_risk(manifest: Mapping[str, Any]) -> None:
    """Print the published bounds as tables, for thresholds and for margins. Where there are none, print why."""
    for key, setting, safer in TABLES:
        risk: Mapping[str, Any] = manifest.get(key, {})
        if risk.get("bounds"):
            _print_bounds(risk, setting, safer)
        else:
            reason = manifest.get("calibration", {}).get(key, {}).get("reason", "")
            name = f"relaxed with {setting}"
            print_line(f"  {name:<24}no certified bound{reason and f' ({reason})'}")


def _print_bounds(risk: Mapping[str, Any], setting: str, safer: str) -> None:
    num_tokens, num_prompts = risk.get("max_new_tokens"), risk.get("num_prompts", "unknown")
    tokens = f"the first {num_tokens} tokens" if num_tokens else "whole answers"
    table = Table(
        f"relaxed with {setting}",
        "differs from full on at most",
        caption=table_cell(f"{tokens}, greedy, confidence {1 - risk['delta']:g}, {num_prompts} prompts"),
    )
    for bound in risk["bounds"]:
        table.add_row(f"{safer} {bound[setting]:g}", f"{bound['epsilon']:.1%} of prompts")
    out.print(table)


def bound_line(started: pb.Started) -> str:
    """Describe the bound that is certified for one relaxed request."""
    if not started.HasField("risk_bound"):
        return "relaxed: no bound is certified for this request"
    tokens = started.risk_bound_tokens
    part = f"in its first {tokens} tokens " if tokens else ""
    return f"relaxed: differs from full {part}on at most {started.risk_bound:.1%} of prompts"
