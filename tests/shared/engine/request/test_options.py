"""What a caller of the library may pass for a request, and what is said about the rest."""

from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.request.options import request_of
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.sampling import SamplingParams
from tests.fixed_costs import fixed_cost_engine
from tests.worker import build_model, build_tokenizer


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build_model(), build_tokenizer())


def test_options_go_where_they_belong(loaded):
    request = request_of(
        loaded,
        "hello",
        {
            "policy": "full",
            "sampling": SamplingParams(temperature=0.5),
            "logprobs": 2,
            "max_tokens": 7,
            "stop_strings": ["x"],
            "stop_token_ids": [3],
            "ignore_eos": True,
            "prediction": "hel",
        },
    )
    assert request == GenerationRequest(
        request.prompt_ids,
        SamplingParams(temperature=0.5),
        StoppingParams(7, ("x",), frozenset({3}), True),
        DepthPolicy("full"),
        logprobs=2,
        prediction_ids=tuple(loaded.tokenizer("hel", add_special_tokens=False)["input_ids"]),
    )


@pytest.mark.parametrize("make", [tuple, list, torch.tensor, np.array, iter])
def test_token_ids_come_in_any_container(loaded, make):
    assert request_of(loaded, make([5, 6, 7]), {}).prompt_ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("temperature", r"belongs to the sampling: sampling=SamplingParams\(temperature=\.\.\)"),
        ("seed", r"SamplingParams\(seed="),
        ("threshold", r"belongs to the policy: policy=DepthPolicy\(threshold=\.\.\)"),
        ("max_drafts", r"DepthPolicy\(max_drafts="),
        ("max_new_tokens", "did you mean max_tokens"),
        ("max_tokns", "did you mean max_tokens"),
        ("stop", "did you mean stop_strings"),
        ("stop_string", "did you mean stop_strings"),
        ("num_beams", "there are: policy, sampling"),
    ],
)
def test_an_option_in_the_wrong_place_is_told_where_it_belongs(loaded, option, says):
    with pytest.raises(InvalidInput, match=says) as caught:
        request_of(loaded, "hello", {option: 1})
    assert caught.value.reason == "UNKNOWN_OPTION"
    assert caught.value.metadata == {"option": option}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampling": {"temperature": 0.5}}, "sampling is a dict; it must be a SamplingParams"),
        ({"policy": None}, "policy is a NoneType; it must be a DepthPolicy"),
        ({"policy": "fast"}, "must be full, exact or relaxed"),
        ({"stop_strings": "abc"}, "must be a list in which each is a text"),
        ({"stop_strings": [1]}, "must be a list in which each is a text"),
        ({"prediction": b"hello"}, "of type bytes"),
        ({"prediction": None}, "of type NoneType"),
        ({"prediction": [1.5]}, "a list of float"),
        ({"prediction": "a\ud800"}, "surrogate"),
    ],
)
def test_a_value_of_another_kind_is_refused(loaded, options: dict[str, Any], says):
    with pytest.raises(InvalidInput, match=says):
        request_of(loaded, "hello", options)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (["hello", "you"], "a list of str"),
        (torch.ones(2, 3, dtype=torch.long), "a list of list"),
        ({"input_ids": [1]}, "of type dict"),
        (b"hello", "of type bytes"),
        (7, "of type int"),
        (None, "of type NoneType"),
        ([1.5], "a list of float"),
        (np.array(7), "of type ndarray"),
        ("a\ud800b", "character 1 of the text is half of a surrogate pair"),
        ([{"role": "user", "content": "\udc00"}], "surrogate"),
        ([{"role": "user"}], "a message must be"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a message must be"),
        ([{"role": "user", "content": "a"}, "b"], "a message must be"),
        ([], "empty"),
    ],
)
def test_a_prompt_of_another_kind_is_refused(loaded, prompt, says):
    with pytest.raises(InvalidInput, match=says):
        request_of(loaded, prompt, {})


def test_submit_takes_what_generate_takes(loaded):
    with fixed_cost_engine(loaded) as engine:
        wanted = engine.generate("hello", policy="full", max_tokens=5)
        events = list(engine.submit("hello", policy="full", max_tokens=5).events())
        assert "".join(event.text for event in events) == wanted.text
        with pytest.raises(InvalidInput, match="belongs to the sampling"):
            engine.submit("hello", temperature=1.0)
        with pytest.raises(InvalidInput, match="max_tokens: a GenerationRequest has"):
            engine.submit(GenerationRequest((5, 6)), max_tokens=5)
