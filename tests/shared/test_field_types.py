"""Fields of the dataclasses that callers of the library make: converted, or refused by name."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from calibrator_service.calibration.spec import CalibrationSpec, SelfGenerated
from neap_engine.tide import TIDEConfig
from shared.constraints.constraint import Constraint
from shared.engine.engine import Engine
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import wrap_model
from shared.model.sampling import SamplingParams
from tests.worker import build_model


@pytest.mark.parametrize(
    ("make", "field", "value", "expected"),
    [
        (SamplingParams, "top_k", np.int64(3), 3),
        (SamplingParams, "temperature", 1, 1.0),
        (SamplingParams, "temperature", np.float32(0.5), 0.5),
        (SamplingParams, "bad_words", [[1, np.int32(2)], (3,)], ((1, 2), (3,))),
        (StoppingParams, "max_tokens", None, None),
        (StoppingParams, "stop_token_ids", iter([np.int64(4), 4]), frozenset({4})),
        (StoppingParams, "stop_strings", ["a"], ("a",)),
        (CalibrationSpec, "exit_depths", [1, 2], (1, 2)),
        (Constraint, "choice", ["yes"], ("yes",)),
    ],
)
def test_values_get_the_declared_type(make: Any, field: str, value: Any, expected: Any) -> None:
    found = getattr(make(**{field: value}), field)
    assert (found, type(found)) == (expected, type(expected))


REFUSED = [
    (SamplingParams, field, value)
    for field, values in {
        "temperature": ("1", None, True, [1.0], 10**400),
        "top_k": (2.5, "2", True, math.nan),
        "seed": (1.5, True, None),
        "min_tokens": (1.0,),
        "presence_penalty": ("1",),
        "bad_words": ("ab", ("ab",), ((1.5,),), (3,), None),
        "logit_bias": ([1], {"a": 1.0}, {1: "x"}),
    }.items()
    for value in values
] + [
    (StoppingParams, "max_tokens", 3.5),
    (StoppingParams, "max_tokens", True),
    (StoppingParams, "stop_strings", "ab"),
    (StoppingParams, "stop_strings", [3]),
    (StoppingParams, "stop_strings", None),
    (StoppingParams, "stop_token_ids", {"a"}),
    (StoppingParams, "stop_token_ids", None),
    (StoppingParams, "stop_token_ids", range(1025)),
    (StoppingParams, "ignore_eos", "no"),
    (DepthPolicy, "max_drafts", 1.5),
    (DepthPolicy, "threshold", "1"),
    (Constraint, "regex", 5),
    (Constraint, "json_schema", {}),
    (Constraint, "choice", "ab"),
    (CalibrationSpec, "max_tokens", "many"),
    (CalibrationSpec, "source", "notes.txt"),
    (SelfGenerated, "prompts", "hello"),
    (TIDEConfig, "exit_threshold", "0.9"),
]


@pytest.mark.parametrize(("make", "field", "value"), REFUSED)
def test_other_values_are_refused_by_name(make: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=field):
        make(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("resumed_ids", None), ("resumed_ids", "ab"), ("logprobs", True), ("logprobs", 2.5), ("sampling", {"top_k": 1})],
)
def test_a_request_refuses_them_too(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=field):
        GenerationRequest((1, 2), **{field: value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_running": 0},
        {"max_running": "3"},
        {"max_queue": 1.5},
        {"ladder_bytes": 0},
        {"kv_budget_bytes": 1e6},
        {"prefix_cache_bytes": -1},
        {"learned_bytes": 1},
    ],
)
def test_an_engine_refuses_wrong_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Engine(wrap_model(build_model()), **wrong)


@pytest.mark.parametrize("model", ["a name", torch.nn.Linear(1, 1)])
def test_an_engine_wants_a_loaded_model(model: Any) -> None:
    with pytest.raises(InvalidInput, match="loaded or wrapped"):
        Engine(model)
