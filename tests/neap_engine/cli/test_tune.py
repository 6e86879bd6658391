"""`neap tune` shows what its measuring process has written."""

import json
import os
import sys

import pytest
from rich.console import Console

from neap_engine.cli import tune
from neap_engine.cli.tune_view import read_results, sweep_table

RUN = {
    "model_id": "tiny",
    "router_version": 3,
    "num_prompts": 2,
    "max_tokens": 16,
    "bound_tokens": 128,
    "machine": "cpu",
}


def record(prompt, policy, tokens, passes, decode_s, threshold=None, bound=None, margin=None):
    return {
        "prompt": prompt,
        "policy": policy,
        "threshold": threshold,
        "margin": margin,
        "bound": bound,
        "token_ids": tokens,
        "decode_s": decode_s,
        "num_deep_passes": passes,
    }


RECORDS = [
    record(0, "full", [1, 2, 3, 4, 5], 4, 0.4),
    record(1, "full", [1, 2, 3, 4, 5], 4, 0.4),
    record(0, "exact", [1, 2, 3, 4, 5], 2, 0.2),
    record(1, "exact", [1, 2, 3, 4, 5], 2, 0.2),
    record(0, "relaxed", [1, 2, 3, 4, 5], 1, 0.1, 0.9, 0.25),
    record(1, "relaxed", [1, 2, 9], 1, 0.1, 0.9, 0.25),
    record(0, "relaxed", [9, 9], 1, 0.1, 0.5),
    record(1, "relaxed", [9, 9], 1, 0.1, 0.5),
    record(0, "relaxed", [1, 2, 3, 4, 5], 1, 0.1, bound=0.3, margin=0.5),
    record(1, "relaxed", [1, 2, 3, 4, 5], 1, 0.1, bound=0.3, margin=0.5),
]


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [RUN, *RECORDS]))
    return path


def cells(table):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    lines = [line for line in capture.get().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_the_table_compares_answers_and_speed_with_full(results):
    assert cells(sweep_table(*read_results(results, [0.5, 0.9], [0.5]))) == [
        ["full", "baseline", "", "10.0", "1.00"],
        ["exact", "0 of 2 (0.0%)", "", "20.0 (2.00x)", "2.00"],
        ["relaxed 0.9", "1 of 2 (50.0%)", "25.0%", "30.0 (3.00x)", "3.00"],
        ["relaxed 0.5", "2 of 2 (100.0%)", "", "10.0 (1.00x)", "1.00"],
        ["relaxed, margin 0.5", "0 of 2 (0.0%)", "30.0%", "40.0 (4.00x)", "4.00"],
    ]


def script(monkeypatch, *statements):
    """Replaces the measuring process by another one."""
    code = "\n".join(["import json, os, sys", *statements])
    real = tune.measure
    monkeypatch.setattr(
        tune, "measure", lambda command, variables: real([sys.executable, "-c", code], variables)
    )


ARGUMENTS = ["prompts.jsonl", "--model", "tiny=/models/tiny", "--threshold", "0.9"]


def test_the_command_shows_progress_a_table_and_a_picture(neap, monkeypatch, results, tmp_path):
    script(monkeypatch, "for n in 1, 2, 3:\n print(json.dumps({'measured': n, 'total': 3}))")
    picture = tmp_path / "pictures" / "tune.png"
    result = neap("tune", *ARGUMENTS, "--results", str(results), "--output", str(picture))
    assert result.exit_code == 0, result.output
    assert "3 of 3 answers" in result.stdout
    assert "relaxed 0.9" in result.stdout
    assert "certified: for the first 128 tokens" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_registry_is_not_a_flag_of_the_process(neap, monkeypatch, results, tmp_path):
    script(monkeypatch, "print(json.dumps({'error': os.environ['NEAP_REGISTRY'], 'reason': 'ECHO'}))")  # fmt: skip
    result = neap("tune", *ARGUMENTS, "--results", str(results), "--registry", "redis://:pw@host/0")
    assert "redis://:pw@host/0 [ECHO]" in result.stderr


def test_an_error_of_the_process_is_the_commands(neap, monkeypatch, results):
    script(
        monkeypatch,
        "print(json.dumps({'error': 'no such alias', 'reason': 'ALIAS_NOT_FOUND'})); sys.exit(1)",
    )
    result = neap("tune", *ARGUMENTS, "--results", str(results))
    assert result.exit_code == 1
    assert "no such alias [ALIAS_NOT_FOUND]" in result.stderr
    assert "relaxed" not in result.stdout


def test_a_process_that_dies_is_an_error(neap, monkeypatch, results):
    script(monkeypatch, "os.abort()")
    result = neap("tune", *ARGUMENTS, "--results", str(results))
    assert result.exit_code == 1
    assert "[MEASURING_ENDED]" in result.stderr


def test_sigterm_ends_the_process_too(neap, monkeypatch, results, tmp_path):
    pid = tmp_path / "pid"
    script(
        monkeypatch,
        "import pathlib, signal, time",
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))",
        "os.kill(os.getppid(), signal.SIGTERM)",
        "time.sleep(600)",
    )
    result = neap("tune", *ARGUMENTS, "--results", str(results))
    assert result.exit_code == 130
    assert f"the same command continues from {results}" in result.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_an_incomplete_file_is_not_shown(neap, monkeypatch, results):
    script(monkeypatch, "pass")
    result = neap("tune", *ARGUMENTS, "--threshold", "0.3", "--results", str(results))
    assert result.exit_code == 1
    assert "is not the file of a complete sweep" in result.stderr


def test_the_process_is_the_measuring_module(neap, monkeypatch, results):
    seen = []
    monkeypatch.setattr(tune, "measure", lambda command, variables: seen.append(command))
    neap("tune", *ARGUMENTS, "--router", "7", "--margin", "0.2", "--results", str(results))
    from neap_engine.tune.__main__ import parse

    options = parse(seen[0][3:])
    assert seen[0][:3] == [sys.executable, "-m", "neap_engine.tune"]
    assert (options.model, options.router) == ("tiny=/models/tiny", "7")
    assert (options.threshold, options.margin) == ([0.9], [0.2])


def test_without_settings_thresholds_and_margins_are_measured(neap, monkeypatch, results):
    seen = []
    monkeypatch.setattr(tune, "measure", lambda command, variables: seen.append(command))
    neap("tune", "prompts.jsonl", "--model", "tiny=/models/tiny", "--results", str(results))
    from neap_engine.tune.__main__ import parse

    options = parse(seen[0][3:])
    assert options.threshold == list(tune.DEFAULT_THRESHOLDS)
    assert options.margin == list(tune.DEFAULT_MARGINS)
