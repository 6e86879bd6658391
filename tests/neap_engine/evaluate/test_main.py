"""The measuring process of `neap evaluate` and `neap tune`, with all its processes in the test's, on a tiny model and a
registry in a folder."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from neap_engine.evaluate import __main__ as evaluate
from shared.ladder.artefact import pack_ladder
from shared.model.load import load_model
from shared.registry.factory import open_registry
from tests.random_ladder import random_ladder
from tests.worker import save_model

PROMPTS = [{"prompt": "hello hello he", "answer": "so 7"}, {"prompt": "in the thin"}]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("site")
    source = save_model(folder / "model")
    ladder = random_ladder(load_model(source, model_id="tiny"), 0, agreement=0.9)
    registry = open_registry(str(folder / "registry"))
    registry.publish("tiny", *pack_ladder(ladder, {}), request_id="once")
    registry.close()
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return SimpleNamespace(source=source, registry=folder / "registry", prompts=prompts)


@pytest.fixture
def report(site, monkeypatch, capsys):
    """Runs the process. Returns its exit status and the lines that it printed."""

    @contextmanager
    def in_this_process(make: Any, *arguments: object) -> Iterator[Any]:
        yield make(*arguments)

    monkeypatch.setattr(evaluate, "in_process", in_this_process)
    monkeypatch.setenv("NEAP_REGISTRY", str(site.registry))
    monkeypatch.setenv("NEAP_THREADS", "1")

    def run(*flags: str) -> tuple[int, list[dict]]:
        arguments = ["--model", f"tiny={site.source}", "--prompts", str(site.prompts), *flags]
        code = evaluate.main(arguments)
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def sweep(report, tmp_path):
    """Runs the process as `neap tune` does. Returns the progress, the report, and the lines of the file of results."""
    results = tmp_path / "results.jsonl"

    def run(*flags: str) -> tuple[list[dict], dict, list[dict]]:
        code, events = report("--max-tokens", "12", "--results", str(results), *flags)
        assert code == 0, events
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        return events[:-1], events[-1]["report"], lines

    return run


def test_all_sides_answer_all_prompts(report):
    code, events = report("--margin", "0.5", "--margin", "1000", "--max-tokens", "12")
    assert code == 0, events
    *progress, last = events
    rows = {row["side"]: row for row in last["report"]["rows"]}
    same = {"full", "exact", "HF generate", "HF prompt lookup", "HF early exit"}
    assert rows.keys() == same | {"relaxed, margin 0.5", "relaxed, margin 1000", "TIDE's method"}
    assert progress == [{"measured": n, "total": 16} for n in range(1, 17)]
    for name in same:
        assert (rows[name]["num_identical"], rows[name]["chosen_share"]) == (2, 1.0), name
    for name in ("full", "HF generate", "TIDE's method"):
        assert rows[name]["layers_per_token"] == 4, name
    assert {row["num_checkable"] for row in rows.values()} == {1}
    assert all(row["tokens_per_s"] > 0 for row in rows.values())


def test_keys_and_values_are_kept_as_a_worker_would_keep_them(report, monkeypatch):
    """Hugging Face's own modules have one dtype. There the setting does not apply."""
    monkeypatch.setenv("NEAP_KV_DTYPE", "bfloat16")
    code, events = report("--max-tokens", "4")
    assert code == 0, events
    found = events[-1]["report"]
    assert "keys and values in torch.bfloat16" in found["run"]["machine"]
    assert {row["side"] for row in found["rows"]} >= {"exact", "HF generate"}


def test_a_sweep_measures_the_policies_alone(sweep):
    progress, report, (run, *lines) = sweep(
        *("--threshold", "0.5", "--threshold", "0.97", "--margin", "1e9", "--margin", "0.25")
    )
    assert progress == [{"measured": n, "total": 12} for n in range(1, 13)]
    assert run == report["run"]
    assert (run["router_version"], run["num_prompts"]) == (1, 2)
    names = ["full", "exact", "relaxed 0.97", "relaxed 0.5", "relaxed, margin 0.25", "relaxed, margin 1e+09"]
    assert [row["side"] for row in report["rows"]] == [line["side"] for line in lines[:6]] == names
    full, exact, *_ = report["rows"]
    assert (full["tokens_per_pass"], exact["num_identical"]) == (1.0, 2)
    assert full["tokens_per_s"] > 0


def test_a_second_sweep_measures_only_what_is_missing(sweep):
    _, _, before = sweep("--threshold", "0.9")
    progress, report, after = sweep("--threshold", "0.9", "--threshold", "0.7", "--router", "1")
    assert [event["measured"] for event in progress] == [7, 8]
    assert [row["num_answers"] for row in report["rows"]] == [2, 2, 2, 2]
    assert after[: len(before)] == before
    assert [line["side"] for line in after[len(before) :]] == ["relaxed 0.7"] * 2
    progress, report, _ = sweep("--threshold", "0.7")
    assert (progress, len(report["rows"])) == ([], 3)


def test_another_dtype_is_measured_as_a_worker_would_serve_it(sweep, monkeypatch):
    monkeypatch.setenv("NEAP_DTYPE", "bfloat16")
    monkeypatch.setenv("NEAP_COMPUTE_DTYPE", "bfloat16")
    _, report, _ = sweep("--threshold", "0.97", "--margin", "0.25")
    assert "products in torch.bfloat16" in report["run"]["machine"]


def test_results_of_other_prompts_are_not_mixed(sweep, report, tmp_path):
    sweep()
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "the"}\n')
    results = ["--results", str(tmp_path / "results.jsonl")]
    code, [event] = report("--prompts", str(other), *results)
    assert (code, event["reason"]) == (1, "RESULTS_OF_ANOTHER_RUN")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--router", "nobody"], "ALIAS_NOT_FOUND"),
        (["--margin", "-1"], "INVALID_INPUT"),
        (["--threshold", "1.5"], "INVALID_INPUT"),
        (["--model", "tiny"], "BAD_CONFIGURATION"),
        (["--max-tokens", "4000"], "INVALID_INPUT"),
    ],
)
def test_what_cannot_be_measured_is_an_error(report, flags, reason):
    code, [event] = report(*flags)
    assert (code, event["reason"]) == (1, reason)


def test_of_the_times_of_all_rounds_the_least_counts(sweep):
    events, found, lines = sweep("--rounds", "3")
    assert events[-1] == {"measured": 12, "total": 12}
    full = {line["prompt"]: line["decode_s"] for line in lines[1:] if line["side"] == "full"}
    assert sorted(full) == [0, 1, 2, 3, 4, 5]
    least_s = sum(min(full[number + 2 * turn] for turn in range(3)) for number in range(2))
    [row] = [row for row in found["rows"] if row["side"] == "full"]
    assert row["num_answers"] == 2
    assert row["tokens_per_s"] == pytest.approx(22 / least_s, rel=0.2)
