"""What requests may take from a model's generation_config."""

from typing import Any

import pytest
import structlog

from shared.model.generation_defaults import GenerationDefaults
from shared.model.loaded import wrap_model
from tests.worker import build_model


def defaults_of(config: dict[str, Any]) -> tuple[GenerationDefaults, list[Any]]:
    model = build_model()
    for name, value in config.items():
        setattr(model.generation_config, name, value)
    with structlog.testing.capture_logs() as lines:
        defaults = wrap_model(model).defaults
    return defaults, [line for line in lines if "default" in line["event"]]


@pytest.mark.parametrize(
    ("config", "sampling", "max_tokens"),
    [
        ({}, {}, None),
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, None),
        ({"min_p": 0.05, "repetition_penalty": 1.05}, {"min_p": 0.05, "repetition_penalty": 1.05}, None),
        ({"max_new_tokens": 300, "max_length": 20}, {}, 300),
        ({"top_k": 0, "do_sample": False, "temperature": 0.0}, {"temperature": 0.0}, None),
    ],
)
def test_what_a_config_states_is_taken(
    config: dict[str, Any], sampling: dict[str, float], max_tokens: int | None
) -> None:
    defaults, logged = defaults_of(config)
    assert (defaults.sampling, defaults.max_tokens) == (sampling, max_tokens)
    assert not logged


@pytest.mark.parametrize(
    "config", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 2.0}, {"temperature": "warm"}]
)
def test_what_no_request_may_have_is_left_out_and_logged(config: dict[str, Any]) -> None:
    [name] = config
    defaults, [line] = defaults_of({**config, "repetition_penalty": 1.1})
    assert defaults.sampling == {"repetition_penalty": 1.1}
    assert name in line["reason"] or "warm" in line["reason"]
