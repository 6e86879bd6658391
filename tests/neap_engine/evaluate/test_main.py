"""The measuring process of `neap evaluate`, with all its processes in the test's, on a tiny model and a registry in a
folder."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from neap_engine.evaluate import __main__ as evaluate
from shared.ladder.artefact import pack_ladder
from shared.ladder.policy import DepthPolicy
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


def test_all_sides_answer_all_prompts(report, monkeypatch):
    monkeypatch.setattr(evaluate, "speed_up", lambda *_: 2.0)
    code, events = report("--margin", "0.5", "--margin", "1000", "--max-tokens", "12")
    assert code == 0, events
    *progress, last = events
    rows = {row["side"]: row for row in last["report"]["rows"]}
    thin = next(name for name in rows if name.endswith("of 4 layers"))
    same = {"full", "exact", "HF generate", "HF prompt lookup", "HF early exit"}
    assert rows.keys() == same | {
        "relaxed, margin 0.5",
        "relaxed, margin 1000",
        thin,
        "TIDE's method",
    }
    assert progress == [{"measured": n, "total": 18} for n in range(1, 19)]
    for name in same:
        assert (rows[name]["num_identical"], rows[name]["chosen_share"]) == (2, 1.0), name
    for name in ("full", "HF generate", "TIDE's method"):
        assert rows[name]["layers_per_token"] == 4, name
    assert rows[thin]["layers_per_token"] == int(thin.split()[0]) < 4
    assert rows[thin]["chosen_share"] < 1.0
    assert rows[thin]["perplexity"] > rows["full"]["perplexity"]
    assert evaluate.engine_policies([0.5])["relaxed, margin 0.5"] == DepthPolicy(
        "relaxed", margin=0.5
    )
    assert rows["relaxed, margin 0.5"]["note"] == "not certified"
    assert {row["num_checkable"] for row in rows.values()} == {1}
    assert all(row["tokens_per_s"] > 0 for row in rows.values())


def test_keys_and_values_are_kept_as_a_worker_would_keep_them(report, monkeypatch):
    """Hugging Face's own modules have one dtype. There the setting does not apply."""
    monkeypatch.setattr(evaluate, "speed_up", lambda *_: 2.0)
    monkeypatch.setenv("NEAP_KV_DTYPE", "bfloat16")
    code, events = report("--max-tokens", "4")
    assert code == 0, events
    found = events[-1]["report"]
    assert "keys and values in torch.bfloat16" in found["run"]["machine"]
    assert {row["side"] for row in found["rows"]} >= {"exact", "HF generate"}


def test_the_number_of_layers_can_be_given(report, monkeypatch):
    monkeypatch.setattr(evaluate, "speed_up", None)
    code, events = report("--layers", "3", "--max-tokens", "4")
    assert code == 0, events
    assert "3 of 4 layers" in {row["side"] for row in events[-1]["report"]["rows"]}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--layers", "4"], "INVALID_INPUT"),
        (["--router", "nobody"], "ALIAS_NOT_FOUND"),
        (["--margin", "-1"], "INVALID_INPUT"),
        (["--max-tokens", "4000"], "INVALID_INPUT"),
    ],
)
def test_what_cannot_be_measured_is_an_error(report, flags, reason):
    code, [event] = report(*flags)
    assert (code, event["reason"]) == (1, reason)
