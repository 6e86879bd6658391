"""What an engine over two ranks does beside decoding: constraints, resumption, memory."""

import json
import threading
from typing import Any

import pytest

from shared.constraints.constraint import Constraint
from shared.engine.memory.budget import kv_token_bytes
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model.cache import ContiguousCache
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.runners import make_runner
from shared.model.sampling import SamplingParams
from tests.constrained import MERGES, OBJECT, VOCABULARY_SIZE, build_loaded, build_random_ladder
from tests.fixed_costs import fixed_cost_engine
from tests.ranks import shared_model
from tests.worker import build_model, build_tokenizer

pytestmark = pytest.mark.full

PROMPT = (5, 17, 3, 44, 8)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, seed=4)
EXACT = DepthPolicy("exact", max_drafts=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build_model(0, VOCABULARY_SIZE).save_pretrained(folder)
    build_tokenizer(MERGES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(ranks, folder):
    with shared_model(ranks, folder) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone():
    return build_loaded()


def _tokens(events: list[Any]) -> list[int]:
    return [token.token_id for event in events[:-1] for token in event.tokens]


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_constrained_answers_are_those_of_full_and_of_one_process(loaded, alone, sampling):
    options = {
        "sampling": sampling,
        "constraint": Constraint(json_schema=json.dumps(OBJECT)),
        "max_tokens": 60,
    }
    with fixed_cost_engine(alone) as engine:
        expected = engine.generate("hello", policy="full", **options)
    with fixed_cost_engine(loaded, build_random_ladder(loaded)) as engine:
        for policy in ("full", EXACT):
            answer = engine.generate("hello", policy=policy, **options)
            assert answer.token_ids == expected.token_ids
        assert answer.stats.num_accepted > 0


def test_an_answer_goes_on_from_any_token_over_a_kept_prefix(loaded):
    """Prompts longer than a message's first part, too."""
    prompt = [number % 200 + 1 for number in range(1500)]
    options = {"sampling": SAMPLED, "max_tokens": 24}
    with fixed_cost_engine(loaded, build_random_ladder(loaded)) as engine:
        whole = engine.generate(prompt, policy="full", **options)
        for cut in (1, 11, 23):
            handle = engine.submit(prompt, policy=EXACT, resumed_ids=tuple(whole.token_ids[:cut]), **options)
            events = [*handle.events()]
            assert _tokens(events) == list(whole.token_ids[cut:])
            assert events[-1].num_cached_tokens > 0


def test_a_request_that_is_put_back_goes_on_with_the_same_tokens(loaded):
    """Its caches on both ranks are given up, kept as a prefix, and made anew."""
    token_bytes = kv_token_bytes(make_runner(loaded, 1 << 20))
    options = {"sampling": SAMPLED, "policy": "exact", "max_tokens": 60}
    with fixed_cost_engine(loaded, kv_budget_bytes=128 * token_bytes, max_running=1) as engine:
        whole = engine.generate(list(PROMPT), **options)
        low = GenerationRequest(PROMPT, SAMPLED, StoppingParams(max_tokens=60), DepthPolicy("exact"), priority=100)
        got: list[Any] = []
        begun, ended = threading.Event(), threading.Event()

        def on_event(event: Any) -> None:
            got.append(event)
            (ended if event is None else begun).set()

        engine.submit(low, on_event=on_event)
        assert begun.wait(60)
        assert len(engine.generate([7, 1], policy="full", max_tokens=30).token_ids) == 30
        assert ended.wait(60)
        assert engine.statistics.num_put_back == 1
    assert _tokens(got[:-1]) == list(whole.token_ids)


def test_a_rank_has_half_of_the_keys_and_values(loaded, alone):
    half, whole = make_runner(loaded, 1 << 20), ContiguousRunner(alone)
    assert 2 * kv_token_bytes(half) == kv_token_bytes(whole)
    linear = loaded.model.model.layers[0].mlp.down_proj
    assert linear.in_features * 2 == alone.model.config.intermediate_size


def test_positions_beyond_a_cache_are_refused_before_another_rank_is_told(loaded):
    runner = make_runner(loaded, 1 << 20)
    cache = runner.new_cache(4)
    with pytest.raises(InvalidInput, match="do not fit"):
        runner.run(runner.ids([1, 2, 3]), cache, first=0, last=runner.num_layers, base=2)
    runner.run(runner.ids([1, 2]), cache, first=0, last=runner.num_layers, base=2)
    with pytest.raises(TypeError, match="LeadingCache"):
        runner.run(runner.ids([1]), ContiguousCache(4), first=0, last=1, base=0)
