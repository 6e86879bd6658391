"""The engine's counts, for requests with known figures."""

import time
from types import SimpleNamespace

import pytest

from shared.engine.statistics import CountedProgress, Distribution, EngineStatistics
from shared.model.loaded import LoadedModel
from tests.families import NUM_LAYERS, VOCABULARY_SIZE
from tests.fixed_costs import fixed_cost_engine
from tests.known_answer import DRAFTING, NUM_NEW, PROMPT, request, right
from tests.scripted_ladder import ScriptedLadder
from tests.waiting import wait_until


def drafts(answer: list[int]) -> ScriptedLadder:
    token = right(answer)
    return lambda context: (token(context), 0.9)


def test_a_distribution_counts_up_to_its_bounds_and_beyond() -> None:
    values = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        values.record(value)
    values.record(2.0, times=3)
    assert values.counts == [2, 4, 1]
    assert values.sum == pytest.approx(16.0)


def test_plain_decoding_saves_nothing(loaded: LoadedModel) -> None:
    with fixed_cost_engine(loaded) as engine:
        for _ in range(2):
            engine.generate(PROMPT, policy="full", max_tokens=NUM_NEW)
        counted = engine.statistics
    assert counted.num_prompt_tokens == 2 * len(PROMPT)
    assert counted.num_generated_tokens == 2 * NUM_NEW
    assert counted.num_layer_executions == 2 * (NUM_NEW - 1) * NUM_LAYERS
    assert counted.num_layer_executions_saved == counted.num_layer_executions_extra == 0
    assert counted.exits == {"full": 2 * NUM_NEW}
    assert not counted.drafted
    assert sum(counted.queue_s.counts) == 2
    # One step reads the prompt, which is this short, and brings the first token.
    assert sum(counted.step_s.counts) == sum(counted.step_sequences.counts) == 2 * NUM_NEW
    assert sum(counted.inter_token_s.counts) == 2 * (NUM_NEW - 1)


def test_right_drafts_are_layers_saved(loaded: LoadedModel, answer: list[int]) -> None:
    with fixed_cost_engine(loaded, ScriptedLadder(drafts(answer))) as engine:
        stats = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW).stats
        counted = engine.statistics
    assert counted.drafted == counted.accepted == {"prompt-lookup": 18}
    assert counted.exits == {"full": 6, "prompt-lookup": 18}
    assert counted.num_layer_executions == stats.num_layer_executions == 5 * NUM_LAYERS
    assert counted.num_layer_executions_saved == 18 * NUM_LAYERS
    assert counted.num_layer_executions_extra == 0
    # Chains of several tokens count once for each of them.
    assert sum(counted.inter_token_s.counts) == NUM_NEW - 1
    assert sum(counted.step_s.counts) == 6


def test_rejected_exits_are_layers_in_excess(loaded: LoadedModel, answer: list[int]) -> None:
    wrong = drafts([(token + 1) % VOCABULARY_SIZE for token in answer])
    ladder = ScriptedLadder(exits=wrong, depths=(2,))
    with fixed_cost_engine(loaded, ladder) as engine:
        stats = engine.generate(PROMPT, policy=DRAFTING, max_tokens=NUM_NEW).stats
        counted = engine.statistics
    assert counted.drafted == {"depth-2": stats.num_drafted}
    assert counted.accepted == {"depth-2": 0}
    assert counted.num_layer_executions_saved == 0
    assert counted.num_layer_executions_extra > 0
    plain = NUM_LAYERS * (NUM_NEW - 1)
    assert counted.num_layer_executions == plain + counted.num_layer_executions_extra


def test_tokens_copied_from_another_request_are_counted_as_cached(loaded: LoadedModel) -> None:
    prompt = [number % VOCABULARY_SIZE for number in range(40)]
    with fixed_cost_engine(loaded, kv_budget_bytes=1 << 24) as engine:
        engine.generate(prompt, policy="full", max_tokens=2)
        assert engine.statistics.num_cached_prompt_tokens == 0
        finished = engine.generate(prompt, policy="full", max_tokens=2).finished
        counted = engine.statistics
    assert counted.num_prompt_tokens == 80
    assert counted.num_cached_prompt_tokens == finished.num_cached_tokens == 39


def test_drafts_are_counted_by_their_proposers() -> None:
    counted = EngineStatistics(NUM_LAYERS)
    counted.record_drafts([("prompt-lookup", 2, 1), ("depth-2", 1, 1), ("learned", 0, 0)], version=None)
    assert counted.drafted == {"prompt-lookup": 2, "depth-2": 1}
    assert counted.accepted == {"prompt-lookup": 1, "depth-2": 1}


def test_time_between_steps_is_shared_by_their_tokens() -> None:
    counted = EngineStatistics(NUM_LAYERS)
    seen = CountedProgress(num_generated=3, num_layer_executions=7, delivered_s=time.monotonic() - 900)
    sequence = SimpleNamespace(
        failure=None,
        answer=SimpleNamespace(num_tokens=6, end=None),
        num_layer_executions=11,
        counted=seen,
    )
    counted.record_step(0.25, [(sequence, [])])
    assert sum(counted.inter_token_s.counts) == 3
    assert 900 <= counted.inter_token_s.sum < 1800  # one interval, not one for each token
    assert counted.num_layer_executions == 4
    # What has been counted is not counted again.
    counted.record_step(0.25, [(sequence, [])])
    assert counted.num_generated_tokens == 3
    assert counted.step_s.sum == pytest.approx(0.5)


def test_cancelled_requests_count_and_give_their_share_of_memory_back(loaded: LoadedModel) -> None:
    with fixed_cost_engine(loaded, kv_budget_bytes=1 << 20) as engine:
        handle = engine.submit(request(50))
        handle.pause()
        wait_until(lambda: engine.num_running)
        assert 0 < engine.kv_usage_ratio < 1
        share = engine.kv_usage_ratio
        other = engine.submit(request(50))
        other.pause()
        wait_until(lambda: engine.num_running == 2)
        assert engine.kv_usage_ratio == pytest.approx(2 * share)
        handle.resume()
        events = handle.events()
        next(events)
        events.close()
        other.cancel()
        wait_until(lambda: not engine.num_running)
        assert engine.kv_usage_ratio == 0
        assert engine.statistics.num_generated_tokens >= 1
