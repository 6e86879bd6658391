import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.convert import (
    from_event,
    to_generation_request,
    to_policy,
    to_router_choice,
    to_sampling,
    to_stopping,
)
from inference_service.routers import RouterChoice
from shared.engine.request.logprobs import Logprobs
from shared.engine.request.request import DepthStatistics, Exit, Finished, FinishReason, TokenChunk
from shared.errors import InvalidInput, PermissionDenied
from shared.ladder.policy import DepthPolicy
from shared.model.generation_defaults import GenerationDefaults
from shared.model.sampling import SamplingParams
from tests.reasons import raises

# A model without a tokenizer.
BARE = SimpleNamespace(tokenizer=None, context_length=100)


def test_absent_sampling_fields_switch_their_filter_off():
    assert to_sampling(pb.Sampling(seed=5), BARE) == SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=5
    )


def test_sampling_fields_arrive():
    message = pb.Sampling(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2, seed=2**64 - 1)
    assert to_sampling(message, BARE) == SamplingParams(0.7, 4, 0.9, 0.1, 1.2, 2**64 - 1)


def test_an_absent_seed_is_chosen_and_zero_is_a_seed():
    assert to_sampling(pb.Sampling(seed=0), BARE).seed == 0
    assert len({to_sampling(pb.Sampling(), BARE).seed for _ in range(4)}) == 4


@pytest.mark.parametrize(
    ("given", "taken", "max_tokens"),
    [
        ({}, {"temperature": 0.6, "top_k": 9}, 30),
        ({"sampling": pb.Sampling(temperature=0)}, {"top_k": 9}, 30),
        ({"sampling": pb.Sampling(top_k=3)}, {"temperature": 0.6, "top_k": 3}, 30),
        ({"stopping": pb.Stopping(max_tokens=5)}, {"temperature": 0.6, "top_k": 9}, 5),
        ({"model_defaults": False}, {}, None),
    ],
    ids=str,
)
def test_what_a_request_leaves_open_comes_from_the_model_if_it_asks(loaded, given, taken, max_tokens):
    stated = GenerationDefaults({"temperature": 0.6, "top_k": 9}, 30)
    request = pb.GenerateRequest(**{"text": "hello", "model_defaults": True, **given})
    generation, _ = to_generation_request(request, replace(loaded, defaults=stated), request_id="r")
    assert generation.sampling == SamplingParams(**taken, seed=generation.sampling.seed)
    assert generation.stopping.max_tokens == max_tokens


def test_a_temperature_that_nobody_states_is_1(loaded):
    request = pb.GenerateRequest(text="hello", model_defaults=True)
    generation, _ = to_generation_request(request, loaded, request_id="r")
    assert generation.sampling == SamplingParams(temperature=1.0, seed=generation.sampling.seed)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": math.nan},  # as an example of what SamplingParams refuses
        {"top_k": 0},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"bad_words": [pb.BadWord()]},
        {"bad_words": [pb.BadWord(text=" ")]},
        {"bad_words": [pb.BadWord(text="x" * 257)]},
        {"bad_words": [pb.BadWord(token_ids=pb.TokenIds())]},
        {"bad_words": [pb.BadWord(token_ids=pb.TokenIds(ids=[3] * 65))]},
        {"bad_words": [pb.BadWord(token_ids=pb.TokenIds(ids=[3]))] * 257},
    ],
    ids=lambda field: str(field)[:40],
)
def test_bad_sampling_is_refused_by_name(field):
    with pytest.raises(InvalidInput, match=next(iter(field))):
        to_sampling(pb.Sampling(**field), BARE)


def test_a_bad_word_of_text_needs_a_tokenizer():
    with raises(InvalidInput, "NO_TOKENIZER"):
        to_sampling(pb.Sampling(bad_words=[pb.BadWord(text="word")]), BARE)


def test_stopping_fields_arrive():
    stopping = to_stopping(pb.Stopping(max_tokens=3, stop_strings=["a"], stop_token_ids=[7, 7], ignore_eos=True))
    assert stopping.max_tokens == 3
    assert stopping.stop_strings == ("a",)
    assert stopping.stop_token_ids == {7}
    assert stopping.ignore_eos
    assert to_stopping(pb.Stopping()).max_tokens is None


@pytest.mark.parametrize(
    "field",
    [
        {"stop_strings": [""]},
        {"stop_strings": ["x" * 257]},
        {"stop_strings": [""] * 17},
        {"stop_token_ids": [7] * 1025},
    ],
    ids=lambda field: next(iter(field)),
)
def test_bad_stopping_is_refused(field):
    with pytest.raises(InvalidInput):
        to_stopping(pb.Stopping(**field))


@pytest.mark.parametrize(
    ("message", "policy"),
    [
        (pb.DepthPolicy(), DepthPolicy("exact")),
        (pb.DepthPolicy(full=pb.Full()), DepthPolicy("full")),
        (pb.DepthPolicy(exact=pb.Exact(max_drafts=3), min_layers=2), DepthPolicy("exact", max_drafts=3, min_layers=2)),
        (pb.DepthPolicy(relaxed=pb.Relaxed()), DepthPolicy("relaxed", threshold=0.85)),
        (
            pb.DepthPolicy(relaxed=pb.Relaxed(threshold=0.5), min_layers=1),
            DepthPolicy("relaxed", threshold=0.5, min_layers=1),
        ),
        (
            pb.DepthPolicy(relaxed=pb.Relaxed(margin=0.0), min_layers=1),
            DepthPolicy("relaxed", margin=0.0, min_layers=1),
        ),
        (pb.DepthPolicy(relaxed=pb.Relaxed(threshold=0.9, margin=0.1)), DepthPolicy("relaxed", 0.9, 0.1)),
    ],
)
def test_depth_policies(message, policy):
    assert to_policy(message) == policy


@pytest.mark.parametrize(
    "message",
    [
        pb.DepthPolicy(relaxed=pb.Relaxed(threshold=0.0)),
        pb.DepthPolicy(relaxed=pb.Relaxed(threshold=math.nan)),
        pb.DepthPolicy(relaxed=pb.Relaxed(margin=-0.1)),
        pb.DepthPolicy(relaxed=pb.Relaxed(margin=math.nan)),
        pb.DepthPolicy(relaxed=pb.Relaxed(margin=math.inf)),
        pb.DepthPolicy(exact=pb.Exact(max_drafts=1000)),
    ],
)
def test_bad_depth_policies_are_refused(message):
    with pytest.raises(InvalidInput):
        to_policy(message)


def test_router_selectors():
    assert to_router_choice(pb.RouterSelector()) == RouterChoice()
    assert to_router_choice(pb.RouterSelector(version=4)) == RouterChoice(version=4)
    assert to_router_choice(pb.RouterSelector(alias="a")) == RouterChoice(alias="a")
    for bad in (pb.RouterSelector(version=0), pb.RouterSelector(alias="")):
        with pytest.raises(InvalidInput):
            to_router_choice(bad)


def _request(loaded, **fields):
    return to_generation_request(pb.GenerateRequest(**fields), loaded, request_id="r")[0]


def test_the_three_forms_of_a_prompt(loaded):
    assert _request(loaded, text="hello").prompt_ids == (260,)
    assert _request(loaded, token_ids=pb.TokenIds(ids=[5, 6])).prompt_ids == (5, 6)
    messages = [pb.ChatMessage(role="system", content="x"), pb.ChatMessage(role="user", content="y")]
    chat = _request(loaded, chat=pb.Chat(messages=messages))
    assert chat.prompt_ids == tuple(loaded.tokenizer("system: x\nuser: y\nassistant:")["input_ids"])
    assert chat.request_id == "r"


@pytest.mark.parametrize(
    ("fields", "least", "priority"),
    [
        ({}, 0, 0),
        ({}, -3, -3),
        ({"priority": 0}, -3, 0),
        ({"priority": 7}, 0, 7),
    ],
)
def test_a_request_has_the_priority_that_it_asks_for_or_its_callers(loaded, fields, least, priority):
    request = pb.GenerateRequest(text="x", **fields)
    made, _ = to_generation_request(request, loaded, request_id="r", least_priority=least)
    assert made.priority == priority


def test_what_may_be_learned_is_never_or_open(loaded):
    for known in (pb.LEARN_UNSPECIFIED, pb.LEARN_NEVER):
        _request(loaded, text="x", learn=known)
    for unknown in (2, -1, 2**31 - 1):
        with pytest.raises(InvalidInput, match="learn"):
            _request(loaded, text="x", learn=unknown)


def test_priorities_have_bounds(loaded):
    with pytest.raises(PermissionDenied):
        _request(loaded, text="x", priority=-101)
    with pytest.raises(InvalidInput, match="priority"):
        _request(loaded, text="x", priority=101)


def predicted(**content):
    return {"text": "x", "prediction": pb.Prediction(**content)}


def test_predictions_are_tokenised_without_special_tokens(loaded):
    ids = loaded.tokenizer("hello there", add_special_tokens=False)["input_ids"]
    of_text = _request(loaded, **predicted(text="hello there"))
    of_ids = _request(loaded, **predicted(token_ids=pb.TokenIds(ids=ids)))
    assert of_text.prediction_ids == of_ids.prediction_ids == tuple(ids)
    assert of_text.prompt_ids == _request(loaded, text="x").prompt_ids
    assert _request(loaded, text="x").prediction_ids == ()
    assert _request(loaded, **predicted()).prediction_ids == ()


def test_logprobs_zero_is_not_absent(loaded):
    assert _request(loaded, text="x").logprobs is None
    assert _request(loaded, text="x", logprobs=0).logprobs == 0


def test_chunks_become_messages():
    exits = Exit(2, "depth-2"), Exit(4, "full")
    chunk = from_event(TokenChunk(("a", "b"), (3, 9), exits), str).chunk
    assert chunk.text == "ab"
    assert [(token.id, token.exit_depth, token.proposer) for token in chunk.tokens] == [(3, *exits[0]), (9, *exits[1])]
    assert not any(token.HasField("text") or token.HasField("logprob") for token in chunk.tokens)


def test_scored_tokens_become_messages():
    logprobs = Logprobs(-0.5, ((3, -0.5), (4, -2.0))), Logprobs(-1.0, ())
    event = TokenChunk(("a", "b"), (3, 9), (Exit(2, "depth-2"), Exit(4, "full")), logprobs)
    first, second = from_event(event, str).chunk.tokens
    assert (first.id, first.exit_depth, first.proposer, first.logprob) == (3, 2, "depth-2", -0.5)
    assert [(a.id, a.logprob) for a in first.alternatives] == [(3, -0.5), (4, -2.0)]
    assert (first.text, [a.text for a in first.alternatives]) == ("3", ["3", "4"])
    assert (second.id, second.proposer, second.logprob, second.text) == (9, "full", -1.0, "9")


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finished_becomes_a_message(reason):
    depth = DepthStatistics({"full": (4, 6), "prompt-lookup": (0, 2)}, 5, 2, 24, 40, 6, 8, 1)
    event = Finished(reason, "stop", "tail", 11, 7, 8, 0.25, 1.5, 2.000000001, depth, 3, 4)
    finished = from_event(event, str).finished
    assert pb.FinishReason.Name(finished.reason) == f"FINISH_REASON_{reason.name}"
    assert (finished.stop_match, finished.text) == ("stop", "tail")
    assert finished.usage == pb.Usage(
        num_prompt_tokens=11,
        num_cached_tokens=7,
        num_completion_tokens=8,
        num_accepted_prediction_tokens=3,
        num_rejected_prediction_tokens=4,
    )
    assert finished.timing.queue.ToNanoseconds() == 250_000_000
    assert finished.timing.prefill.ToNanoseconds() == 1_500_000_000
    assert finished.timing.decode.ToNanoseconds() == 2_000_000_001
    assert finished.depth == pb.DepthStatistics(
        exits=[
            pb.ProposerCount(proposer="prompt-lookup", depth=0, num_tokens=2),
            pb.ProposerCount(proposer="full", depth=4, num_tokens=6),
        ],
        num_drafted=5,
        num_accepted=2,
        num_layer_executions=24,
        mean_layers_per_token=3.0,
        num_deep_passes=6,
        num_token_layers=40,
        num_relaxed=1,
    )
