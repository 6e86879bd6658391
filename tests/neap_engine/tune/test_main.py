"""The measuring process of `neap tune`, in the test's process, on a tiny model and a registry in a folder."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from neap_engine.tune.__main__ import main
from shared.ladder.artefact import pack_ladder
from shared.model.load import load_model
from shared.registry.factory import open_registry
from tests.random_ladder import random_ladder
from tests.worker import save_model

RISK = {
    "loss": "generation_differs",
    "engine": {"dtype": "float32", "device": "cpu"},
    "delta": 0.05,
    "num_prompts": 400,
    "max_new_tokens": 128,
    "bounds": [{"threshold": 0.95, "epsilon": 0.1}],
}
MARGIN_RISK = {**RISK, "max_new_tokens": 64, "bounds": [{"margin": 0.5, "epsilon": 0.2}]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model's folder, a registry with one router for it, and a file of two prompts."""
    folder = tmp_path_factory.mktemp("site")
    source = save_model(folder / "model")
    ladder = random_ladder(load_model(source, model_id="tiny"), 0, agreement=0.9)
    registry = open_registry(str(folder / "registry"))
    registry.publish(
        "tiny", *pack_ladder(ladder, {"risk": RISK, "margin_risk": MARGIN_RISK}), request_id="once"
    )
    registry.close()
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello hello he"}\n{"prompt": "in the thin"}\n')
    return SimpleNamespace(source=source, registry=folder / "registry", prompts=prompts)


@pytest.fixture
def tune(site, tmp_path, monkeypatch, capsys):
    """Runs the process. Returns its exit status, the lines it printed, and the lines of its results file."""
    monkeypatch.setenv("NEAP_REGISTRY", str(site.registry))
    monkeypatch.setenv("NEAP_THREADS", "1")

    def run(*more: str, prompts: Path = site.prompts) -> tuple[int, list[dict], list[dict]]:
        results = tmp_path / "results.jsonl"
        flags = ["--model", f"tiny={site.source}", "--prompts", str(prompts), "--max-tokens", "12"]
        code = main([*flags, "--results", str(results), *more])
        lines = results.read_text().splitlines() if results.exists() else []
        events = capsys.readouterr().out.splitlines()
        return code, [json.loads(line) for line in events], [json.loads(line) for line in lines]

    return run


def test_every_policy_answers_every_prompt(tune):
    code, events, (run, *records) = tune(
        *("--threshold", "0.5", "--threshold", "0.97", "--margin", "1e9", "--margin", "0.25")
    )
    assert code == 0
    assert events == [{"measured": n, "total": 12} for n in range(1, 13)]
    assert (run["router_version"], run["num_prompts"], run["bound_tokens"]) == (1, 2, 64)
    assert [
        (r["prompt"], r["policy"], r["threshold"], r["margin"], r["bound"]) for r in records
    ] == [
        (prompt, *setting)
        for prompt in (0, 1)
        for setting in (
            ("full", None, None, None),
            ("exact", None, None, None),
            ("relaxed", 0.97, None, 0.1),
            ("relaxed", 0.5, None, None),
            ("relaxed", None, 0.25, 0.2),
            ("relaxed", None, 1e9, None),
        )
    ]
    full, exact, *_ = records
    assert full["token_ids"] == exact["token_ids"]
    assert full["num_deep_passes"] == len(full["token_ids"]) - 1
    assert full["decode_s"] > 0


def test_a_second_run_measures_only_what_is_missing(tune, tmp_path):
    _, _, before = tune("--threshold", "0.9")
    code, events, after = tune("--threshold", "0.9", "--threshold", "0.7", "--router", "1")
    assert code == 0
    assert [event["measured"] for event in events] == [7, 8]
    assert after[: len(before)] == before
    assert [record["threshold"] for record in after[len(before) :]] == [0.7, 0.7]
    assert tune("--threshold", "0.7")[1] == []


def test_another_dtype_is_measured_as_a_worker_would_serve_it_and_no_bound_holds(tune, monkeypatch):
    monkeypatch.setenv("NEAP_DTYPE", "bfloat16")
    monkeypatch.setenv("NEAP_COMPUTE_DTYPE", "bfloat16")
    code, _, (run, *records) = tune("--threshold", "0.97", "--margin", "0.25")
    assert code == 0
    assert "products in torch.bfloat16" in run["machine"]
    assert run["bound_tokens"] is None
    assert {record["bound"] for record in records} == {None}


def test_results_of_other_prompts_are_not_mixed(tune, tmp_path):
    tune()
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "the"}\n')
    code, (event,), _ = tune(prompts=other)
    assert (code, event["reason"]) == (1, "RESULTS_OF_ANOTHER_RUN")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--router", "stable"], "ALIAS_NOT_FOUND"),
        (["--router", "9"], "ROUTER_VERSION_NOT_FOUND"),
        (["--threshold", "1.5"], "INVALID_INPUT"),
        (["--margin", "-1"], "INVALID_INPUT"),
        (["--max-tokens", "1"], "INVALID_INPUT"),
        (["--model", "tiny"], "BAD_CONFIGURATION"),
        (["--model", "tiny=/nowhere"], "MODEL_NOT_FOUND"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_what_cannot_be_measured_is_one_line(tune, flags, reason):
    code, events, results = tune(*flags)
    assert (code, [event["reason"] for event in events], results) == (1, [reason], [])
