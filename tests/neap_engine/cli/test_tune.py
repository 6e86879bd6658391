"""`neap tune` shows the report of its measuring process."""

import json
import sys

import pytest

from neap_engine.cli import tune
from neap_engine.evaluate.__main__ import parse
from tests.neap_engine.cli.test_processes import is_alive
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("measured_place")

RUN = {
    "model_id": "tiny",
    "router_version": 3,
    "num_prompts": 2,
    "max_tokens": 16,
    "machine": "cpu",
}


def row(side, num_identical, speed, tokens_per_pass):
    counts = {"num_answers": 2, "num_identical": num_identical}
    speeds = {"speed_up": speed / 10, "speed_low": speed / 11, "speed_high": speed / 8}
    return {"side": side, "tokens_per_s": speed, "tokens_per_pass": tokens_per_pass, **speeds, **counts}


REPORT = {
    "run": RUN,
    "rows": [row("full", 2, 10.0, 1.0), row("relaxed 0.9", 1, 30.0, 3.0), row("relaxed 0.5", 2, 40.0, 3.5)],
}


def script(monkeypatch, *statements):
    """Replaces the measuring process by another one."""
    code = "\n".join(["import json, os, sys", *statements])
    real = tune.measure
    monkeypatch.setattr(tune, "measure", lambda command, variables: real([sys.executable, "-c", code], variables))


ARGUMENTS = ["prompts.jsonl", "--model", "tiny=/models/tiny", "--threshold", "0.9"]


def test_the_command_shows_progress_a_table_and_a_picture(neap, monkeypatch, tmp_path):
    script(
        monkeypatch,
        "for n in 1, 2, 3:\n print(json.dumps({'measured': n, 'total': 3}))",
        f"print({json.dumps({'report': REPORT})!r})",
    )
    picture = tmp_path / "pictures" / "tune.png"
    result = neap("tune", *ARGUMENTS, "--output", str(picture))
    assert "3 of 3 answers" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line.strip("│").split("│")] for line in lines] == [
        ["full", "0 of 2 (0.0%)", "10.0 (1.00x)", "0.91x to 1.25x", "1.00"],
        ["relaxed 0.9", "1 of 2 (50.0%)", "30.0 (3.00x)", "2.73x to 3.75x", "3.00"],
        ["relaxed 0.5", "0 of 2 (0.0%)", "40.0 (4.00x)", "3.64x to 5.00x", "3.50"],
    ]
    warnings = [line for line in result.stdout.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "relaxed 0.5 cannot be 4.00x as fast at 3.50 tokens" in warnings[0]
    assert "relaxed is lossy" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_registry_is_not_a_flag_of_the_process(neap, monkeypatch, tmp_path):
    script(monkeypatch, "print(json.dumps({'error': os.environ['NEAP_REGISTRY'], 'reason': 'ECHO'}))")  # fmt: skip
    url = "redis://:pw@host/0?objects=s3://bucket/prefix"
    result = neap("tune", *ARGUMENTS, "--registry", url, code=1)
    assert f"{url} [ECHO]" in result.stderr.replace("\n", "")
    assert "registry: s3://bucket/prefix" in result.stderr


def test_nothing_is_measured_without_a_registry_or_prompts(neap, monkeypatch, tmp_path):
    script(monkeypatch, "raise SystemExit('measured')")
    result = neap("tune", *ARGUMENTS, "--registry", str(tmp_path / "typo"), code=1)
    assert "REGISTRY_NOT_FOUND" in result.stderr
    assert not (tmp_path / "typo").exists()
    result = neap("tune", "missing.jsonl", *ARGUMENTS[1:], code=1)
    assert "PROMPT_FILE_NOT_FOUND" in result.stderr


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            "print(json.dumps({'error': 'no such alias', 'reason': 'ALIAS_NOT_FOUND'})); sys.exit(1)",
            "no such alias [ALIAS_NOT_FOUND]",
        ),
        ("os.abort()", "[MEASURING_ENDED]"),
    ],
)
def test_an_error_or_the_end_of_the_process_is_the_commands_error(neap, monkeypatch, end, said):
    script(monkeypatch, end)
    result = neap("tune", *ARGUMENTS, code=1)
    assert said in result.stderr
    assert "relaxed" not in result.stdout


def test_sigterm_ends_the_process_too(neap, monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    script(
        monkeypatch,
        "import pathlib, signal, time",
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))",
        "os.kill(os.getppid(), signal.SIGTERM)",
        "time.sleep(600)",
    )
    result = neap("tune", *ARGUMENTS, code=130)
    assert "the same command continues from neap-tune.jsonl" in result.stderr
    wait_until(lambda: not is_alive(int(pid.read_text())))


def test_the_process_is_the_measuring_module(neap, monkeypatch):
    seen = []
    monkeypatch.setattr(tune, "measure", lambda command, variables: seen.append(command))
    neap("tune", *ARGUMENTS, "--router", "7", "--margin", "0.2", code=1)
    options = parse(seen[0][3:])
    assert seen[0][:3] == [sys.executable, "-m", "neap_engine.evaluate"]
    assert (options.model, options.router) == ("tiny=/models/tiny", "7")
    assert (options.threshold, options.margin) == ([0.9], [0.2])


def test_without_settings_thresholds_and_margins_are_measured(neap, monkeypatch):
    seen = []
    monkeypatch.setattr(tune, "measure", lambda command, variables: seen.append(command))
    neap("tune", "prompts.jsonl", "--model", "tiny=/models/tiny", code=1)
    options = parse(seen[0][3:])
    assert options.threshold == list(tune.DEFAULT_THRESHOLDS)
    assert options.margin == list(tune.DEFAULT_MARGINS)
