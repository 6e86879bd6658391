"""An answer that is continued from its first tokens is the answer that was never interrupted."""

import threading
from functools import cache
from typing import Any

import pytest

from shared.engine.engine import Engine
from shared.engine.memory.budget import kv_token_bytes
from shared.engine.request.request import Finished, FinishReason, GenerationRequest, StoppingParams, TokenChunk
from shared.ladder.policy import DepthPolicy
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.sampling import SamplingParams
from tests.families import BORDER, VOCABULARY_SIZE, build_family
from tests.fixed_costs import fixed_cost_engine
from tests.scripted_ladder import ScriptedLadder
from tests.tiers import tiered

PROMPT = (5, 17, 3, 44, 8)
NUM_NEW = 20
# With them, positions change what is computed: windows, chunks, angles that depend on the length, and keys that are
# read again.
FAMILIES = ("llama", "mistral-sliding", "phi3-longrope", "llama-longrope", "ministral3", "mixtral")
SAMPLINGS = {
    "greedy": SamplingParams(),
    "penalised": SamplingParams(repetition_penalty=1.3),
    "counted": SamplingParams(presence_penalty=0.02, frequency_penalty=0.05, min_tokens=NUM_NEW, bad_words=((8, 3),)),
    "counted and sampled": SamplingParams(temperature=1.1, seed=4, frequency_penalty=1.0, logit_bias={3: 2.0}),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=11),
    "both": SamplingParams(temperature=1.1, top_k=20, seed=3, repetition_penalty=1.2),
}
# What a position does is the family's business, and what a token costs that of the rule: every family under one rule of
# each kind, and every rule with one family.
CASES = [*(("llama", name) for name in SAMPLINGS), *((name, "both") for name in FAMILIES if name != "llama")]
USUAL = {("llama", "penalised"), ("llama", "counted and sampled"), ("phi3-longrope", "both")}
CUTS = (1, 6, BORDER - len(PROMPT) - 1, BORDER - len(PROMPT), BORDER - len(PROMPT) + 1, NUM_NEW - 1)


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return _load(request.param)


@cache
def _load(family: str) -> LoadedModel:
    return wrap_model(build_family(family), accelerate=True)


def generated(
    engine: Engine, sampling: SamplingParams, resumed: tuple[int, ...] = (), **options: object
) -> tuple[list[int], Finished]:
    """The new tokens, and the end."""
    options = {"max_tokens": NUM_NEW, **options}
    tokens: list[int] = []
    handle = engine.submit(list(PROMPT), sampling=sampling, resumed_ids=resumed, **options)
    for event in handle.events():
        if isinstance(event, TokenChunk):
            tokens += [token.token_id for token in event.tokens]
        else:
            finished = event
    return tokens, finished


@pytest.mark.parametrize(("loaded", "way"), tiered(CASES, USUAL), indirect=["loaded"])
@pytest.mark.parametrize("prefix_cache_bytes", [0, None])
def test_a_continued_answer_is_that_of_an_uninterrupted_run(loaded, way, prefix_cache_bytes):
    """Begun by one policy and continued by the other, at any border and beside others."""
    sampling = SAMPLINGS[way]
    ladder = ScriptedLadder(lambda context: (sum(context) % VOCABULARY_SIZE, 0.6))
    with fixed_cost_engine(loaded, ladder, prefix_cache_bytes=prefix_cache_bytes) as engine:
        whole, end = generated(engine, sampling, policy="full")
        assert end.num_completion_tokens == NUM_NEW
        for policy in ("exact", "full"):
            for cut in CUTS:
                beside = engine.submit([9, 9, cut], policy="full", max_tokens=NUM_NEW)
                rest, end = generated(engine, sampling, tuple(whole[:cut]), policy=policy)
                beside.cancel()
                assert rest == whole[cut:], f"{policy} after {cut} tokens"
                assert end.num_completion_tokens == NUM_NEW, "counted once, by who ends it"
                assert end.num_prompt_tokens == len(PROMPT)
                assert end.num_cached_tokens <= len(PROMPT)
                assert end.depth.num_tokens == NUM_NEW - cut
        assert engine.statistics.num_layer_executions_extra >= 0


@pytest.fixture
def engine():
    with fixed_cost_engine(_load("llama")) as engine:
        yield engine


def test_a_whole_answer_only_ends(engine):
    whole, _ = generated(engine, SamplingParams(), policy="full")
    steps = sum(engine.statistics.step_s.counts)
    rest, end = generated(engine, SamplingParams(), tuple(whole), policy="full")
    assert (rest, end.reason) == ([], FinishReason.LENGTH)
    assert sum(engine.statistics.step_s.counts) == steps
    stopped = tuple(whole[:4])
    rest, end = generated(engine, SamplingParams(), stopped, policy="full", stop_token_ids={whole[3]})
    assert (rest, end.reason) == ([], FinishReason.STOP_TOKEN)


def test_what_a_prediction_was_worth_is_known_of_an_answer_that_was_whole_when_it_was_resumed(engine):
    options = {"policy": "full", "max_tokens": 12, "ignore_eos": True}
    tokens = engine.generate([1, 2, 3], **options).token_ids
    options["prediction"] = [*tokens[:5], tokens[5] + 1, *tokens[6:]]
    whole = engine.generate([1, 2, 3], **options).finished
    assert whole.num_accepted_prediction_tokens > 0
    for given in (tokens[:7], tokens):
        resumed = engine.generate([1, 2, 3], resumed_ids=given, **options).finished
        assert resumed.num_accepted_prediction_tokens == whole.num_accepted_prediction_tokens
        assert resumed.num_rejected_prediction_tokens == whole.num_rejected_prediction_tokens


def test_only_new_tokens_are_counted(engine):
    whole, _ = generated(engine, SamplingParams(), policy="full")
    before = engine.statistics.num_generated_tokens, engine.statistics.num_requests
    generated(engine, SamplingParams(), tuple(whole[:15]), policy="full")
    assert engine.statistics.num_generated_tokens == before[0] + NUM_NEW - 15
    assert engine.statistics.num_requests == before[1] + 1
    assert sum(engine.statistics.inter_token_s.counts) == NUM_NEW - 1 + NUM_NEW - 15 - 1


@pytest.mark.parametrize(("loaded", "way"), tiered(CASES, USUAL), indirect=["loaded"])
@pytest.mark.parametrize("kv_tokens", [130, 4096], ids=["memory", "places"])
def test_a_request_that_is_put_back_goes_on_with_the_same_tokens(loaded, way, kv_tokens):
    """Other requests need its memory or its place, several times, and end before it."""
    sampling = SAMPLINGS[way]
    ladder = ScriptedLadder(lambda context: (sum(context) % VOCABULARY_SIZE, 0.6))
    order: list[str] = []
    token_bytes = kv_token_bytes(ContiguousRunner(loaded))
    options = {"sampling": sampling, "policy": "exact", "max_tokens": 100}
    with fixed_cost_engine(loaded, ladder, kv_budget_bytes=kv_tokens * token_bytes, max_running=1) as engine:
        whole = engine.generate(list(PROMPT), **options)
        low = GenerationRequest(
            PROMPT,
            sampling=sampling,
            stopping=StoppingParams(max_tokens=100),
            policy=DepthPolicy("exact"),
            priority=100,
        )
        got: list[Finished | TokenChunk] = []
        some, ended = threading.Semaphore(0), threading.Event()

        def on_event(event: Any) -> None:
            if event is None:
                order.append("low")
                ended.set()
            else:
                got.append(event)
                some.release()

        engine.submit(low, on_event=on_event)
        for number in range(3):
            while some.acquire(blocking=False):
                pass
            some.acquire()  # it runs
            other = engine.generate([7, number + 1], policy="full", max_tokens=30)
            assert len(other.token_ids) == 30
            order.append("other")
        assert ended.wait(60)
        assert order == ["other", "other", "other", "low"]
        assert engine.statistics.num_put_back == 3
    *chunks, finished = got
    tokens = [token.token_id for chunk in chunks for token in chunk.tokens]
    assert tokens == list(whole.token_ids)
    assert finished.num_completion_tokens == finished.depth.num_tokens == 100
    assert finished.num_cached_tokens <= len(PROMPT)


@pytest.mark.parametrize("loaded", [CASES[0][0]], indirect=True)
def test_what_a_request_copies_from_itself_after_it_was_put_back_is_not_cached(loaded):
    token_bytes = kv_token_bytes(ContiguousRunner(loaded))
    with fixed_cost_engine(loaded, kv_budget_bytes=4096 * token_bytes, max_running=1) as engine:
        prompt = tuple(number % 7 + 1 for number in range(60))
        low = GenerationRequest(
            prompt, stopping=StoppingParams(max_tokens=60), policy=DepthPolicy("full"), priority=100
        )
        got: list[Any] = []
        begun, ended = threading.Event(), threading.Event()

        def on_event(event: Any) -> None:
            got.append(event)
            (ended if event is None else begun).set()

        engine.submit(low, on_event=on_event)
        assert begun.wait(60)
        engine.generate([7, 8], policy="full", max_tokens=3)
        assert ended.wait(60)
        assert engine.statistics.num_put_back == 1
        assert got[-2].num_cached_tokens == 0
        assert engine.num_cached_tokens > 50, "others may copy it"


def test_a_request_is_not_put_back_for_ever(engine, monkeypatch):
    monkeypatch.setattr("shared.engine.request.job.MAX_PUT_BACK", 0)
    low = GenerationRequest(PROMPT, stopping=StoppingParams(max_tokens=20), policy=DepthPolicy("full"), priority=100)
    with fixed_cost_engine(wrap_model(build_family("llama")), max_running=1) as one:
        handle = one.submit(low)
        assert one.generate([7], policy="full", max_tokens=3)
        assert list(handle.events())[-1].num_completion_tokens == 20
        assert one.statistics.num_put_back == 0
