"""Prints the certified bounds of the policy relaxed. `shared.ladder.risk` defines their form in the manifest."""

from collections.abc import Mapping
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb
from rich.table import Table

from shared.cli.console import out, print_line, table_cell


def print_risk(manifest: Mapping[str, Any]) -> None:
    """Print the published bounds as a table. If there are none, print why."""
    risk: Mapping[str, Any] = manifest.get("risk", {})
    if not risk.get("bounds"):
        reason = manifest.get("calibration", {}).get("risk", {}).get("reason", "")
        print_line(f"  relaxed   no certified bound{reason and f' ({reason})'}")
        return
    num_tokens, num_prompts = risk.get("max_new_tokens"), risk.get("num_prompts", "unknown")
    tokens = f"the first {num_tokens} tokens" if num_tokens else "whole answers"
    table = Table(
        "relaxed with threshold",
        "differs from full on at most",
        caption=table_cell(
            f"{tokens}, greedy, confidence {1 - risk['delta']:g}, {num_prompts} prompts"
        ),
    )
    for bound in risk["bounds"]:
        table.add_row(f">= {bound['threshold']:g}", f"{bound['epsilon']:.1%} of prompts")
    out.print(table)


def bound_line(started: pb.Started) -> str:
    """Describe the bound that is certified for one relaxed request."""
    if not started.HasField("risk_bound"):
        return "relaxed: no bound is certified for this request"
    tokens = started.risk_bound_tokens
    part = f"in its first {tokens} tokens " if tokens else ""
    return f"relaxed: differs from full {part}on at most {started.risk_bound:.1%} of prompts"
