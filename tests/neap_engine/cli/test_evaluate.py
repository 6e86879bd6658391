"""`neap evaluate` shows the report of its measuring process."""

import csv
import json
import sys

import pytest
from rich.console import Console

from neap_engine.cli import evaluate, tune
from neap_engine.cli.evaluate_view import evaluation_table

pytestmark = pytest.mark.usefixtures("measured_place")

RUN = {"model_id": "tiny", "router_version": 3, "num_prompts": 4, "max_tokens": 16, "machine": "cpu"}


def row(side, speed, **figures):
    empty = {"note": "", "num_answers": 4, "num_identical": 4, "chosen_share": 1.0}
    empty |= {
        "perplexity": 1.5,
        "num_right": 0,
        "num_checkable": 0,
        "lost_low": 0.0,
        "lost_high": 0.5,
        "layers_per_token": 30.0,
        "tokens_per_pass": 0.0,
        "speed_up": speed / 10,
        "speed_low": speed / 20,
        "speed_high": speed / 8,
    }
    return {"side": side, "tokens_per_s": speed, **empty, **figures}


ROWS = [
    row("full", 10.0, num_right=1, num_checkable=3),
    row("exact", 20.0, layers_per_token=15.0, num_checkable=3),
    row("TIDE's method", 0.0, num_answers=0, note="not measured: the model has no final norm"),
]


def test_the_table_compares_all_sides_with_full():
    console = Console(width=200)
    with console.capture() as capture:
        console.print(evaluation_table(RUN, ROWS))
    lines = [line for line in capture.get().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line.strip("│").split("│")] for line in lines] == [
        ["full", "10.0 (1.00x)", "0.50x to 1.25x", "30.0", "4 of 4", "100.0%", "1.500", "1 of 3"],
        ["exact", "20.0 (2.00x)", "1.00x to 2.50x", "15.0", "4 of 4", "100.0%", "1.500", "0 of 3"],
        ["TIDE's method", *[""] * 7],
    ]


def test_the_command_shows_a_table_and_writes_csv_and_picture(neap, monkeypatch, tmp_path):
    event = {"report": {"run": RUN, "rows": ROWS}}
    code = f"import sys; assert '0.3' in sys.argv; print({json.dumps(event)!r})"
    real = evaluate.measure
    monkeypatch.setattr(
        evaluate, "measure", lambda command, variables: real([sys.executable, "-c", code, *command[3:]], variables)
    )
    table, picture = tmp_path / "out" / "table.csv", tmp_path / "out" / "picture.png"
    flags = ["--model", "tiny=/m", "--margin", "0.3", "--csv", str(table), "--output", str(picture)]
    result = neap("evaluate", "prompts.jsonl", *flags)
    for line in (
        "TIDE's method: not measured: the model has no final norm",
        "exact: 0.0% to 50.0% fewer right answers than full",
    ):
        assert line in result.stdout
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["side"], line["tokens_per_s"]) for line in lines] == [
        ("full", "10.0"),
        ("exact", "20.0"),
        ("TIDE's method", "0.0"),
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_process_without_a_report_is_an_error(neap, monkeypatch):
    monkeypatch.setattr(tune, "MODULE", "string")
    result = neap("evaluate", "prompts.jsonl", "--model", "tiny=/m", code=1)
    assert "MEASURING_ENDED" in result.stderr
