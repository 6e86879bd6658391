"""What is said about a model that cannot be loaded names who could not."""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from shared.errors import InvalidInput, UnsupportedModel
from shared.model.load import load_model
from shared.model.loaded import wrap_model
from tests.worker import EOS, build_model, save_model


@pytest.mark.parametrize("ids", [[EOS, 263, -1], 263])
def test_an_end_token_outside_the_vocabulary_ends_nothing(ids: Any) -> None:
    """On a GPU a rule about such a token, as min_tokens is one, would end the process."""
    model = build_model()
    model.generation_config.eos_token_id = ids
    with structlog.testing.capture_logs() as lines:
        assert wrap_model(model).eos_token_ids == ({EOS} if isinstance(ids, list) else set())
    [line] = [line for line in lines if line["log_level"] == "warning"]
    assert 263 in line["ids"]


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1, "temperature": 0.7},
        {"repetition_penalty": 1.05},
        {"bad_words_ids": [[7]], "no_repeat_ngram_size": 3},
        {"suppress_tokens": [1], "forced_eos_token_id": 0},
        {"min_new_tokens": 1, "sequence_bias": [[[3], 1.5]]},
    ],
)
def test_rules_of_the_generation_config_that_are_not_applied_are_named(rules: dict[str, Any]) -> None:
    model = build_model()
    for name, value in rules.items():
        setattr(model.generation_config, name, value)
    with structlog.testing.capture_logs() as lines:
        wrap_model(model)
    warned = [line for line in lines if line["log_level"] == "warning"]
    if rules and "temperature" not in rules:
        [line] = warned
        assert rules.items() <= line.items()
    else:
        assert not warned


def test_a_context_that_is_too_short_is_refused() -> None:
    model = build_model()
    for length in (0, 1, -1, 8.0, "8"):
        with pytest.raises(InvalidInput, match="context_length"):
            wrap_model(model, context_length=length)  # type: ignore[arg-type]
    assert wrap_model(model, context_length=2).context_length == 2
    model.config.max_position_embeddings = 8
    with pytest.raises(UnsupportedModel) as caught:
        wrap_model(model)
    assert caught.value.reason == "CONTEXT_TOO_SHORT"


def broken(*_: object, **__: object) -> object:
    raise RuntimeError("the text of a foreign exception")


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("AutoConfig.from_pretrained", "transformers cannot load"),
        ("AutoModelForCausalLM.from_pretrained", "transformers cannot load"),
        ("AutoTokenizer.from_pretrained", "transformers cannot load"),
        ("fingerprint", "neap cannot prepare"),
        ("wrap_model", "neap cannot prepare"),
    ],
)
def test_an_unexpected_error_is_ascribed_to_whose_it_is(
    place: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "model")
    monkeypatch.setattr(f"shared.model.load.{place}", broken)
    with structlog.testing.capture_logs() as lines, pytest.raises(UnsupportedModel, match=says) as caught:
        load_model(folder)
    assert "RuntimeError" in caught.value.message
    assert "foreign" not in caught.value.message
    assert [line["event"] for line in lines if line.get("exc_info")] == ["cannot load model"]


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(UnsupportedModel, match=r"transformers cannot load .* \(ValueError"):
        load_model(tmp_path)
