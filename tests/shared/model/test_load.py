"""What is said about a model that cannot be loaded names who could not."""

import json
from pathlib import Path

import pytest
import structlog

from shared.errors import UnsupportedModel
from shared.model.load import load_model
from tests.worker import save_model


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
