"""The engine with paged KV and recorded passes, as on a GPU: the same answers, and all blocks are returned in the
end."""

import gc
import random
import threading
from collections.abc import Iterator

import pytest
import torch

from bench.imposed import SHAPES, impose
from shared.engine.engine import Engine
from shared.engine.memory import prefixes as prefixes_module
from shared.engine.request.request import Finished, GenerationRequest, StoppingParams, TokenChunk
from shared.errors import Cancelled
from shared.ladder.policy import DepthPolicy
from shared.model import paged_runner
from shared.model.loaded import LoadedModel
from shared.model.paged_kv import BLOCK_TOKENS
from shared.model.paged_runner import PagedRunner
from tests.families import VOCABULARY_SIZE
from tests.fixed_costs import fixed_cost_engine
from tests.paged import block_bytes, load_family, make_runner
from tests.random_ladder import random_ladder
from tests.scripted_ladder import ScriptedLadder
from tests.tiers import tiered
from tests.waiting import wait_until

NUM_NEW = 14
NUM_PAGES = 15
EXACT = DepthPolicy("exact", max_drafts=4)
STEM = tuple(random.Random(3).choices(range(2, VOCABULARY_SIZE), k=40))


# Gemma 3 has all that Llama has, and windows.
@pytest.fixture(scope="module", params=tiered(["llama", "gemma3-sliding"], {"gemma3-sliding"}))
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    torch.manual_seed(0)
    return load_family(request.param)


@pytest.fixture(scope="module")
def own(loaded: LoadedModel) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Answers of the engine without blocks. Only one engine at a time may use the model."""
    with fixed_cost_engine(loaded) as plain:
        return {prompt: plain.generate(prompt, policy="full", max_tokens=NUM_NEW).token_ids for prompt in prompts(3)}


def paged_engine(loaded: LoadedModel, *, shares_prefixes: bool = True) -> Engine:
    """Room for about three of these requests at once, prefixes included."""
    budget = NUM_PAGES * block_bytes(loaded)
    cached = budget // 3 if shares_prefixes else 0
    return fixed_cost_engine(loaded, kv_budget_bytes=budget, prefix_cache_bytes=cached, runner_of=make_runner)


@pytest.fixture
def engine(loaded: LoadedModel, own: object) -> Iterator[Engine]:
    with paged_engine(loaded) as made:
        yield made


def prompts(count: int) -> list[tuple[int, ...]]:
    draw = random.Random(5)
    lengths = [draw.choice([3, 9, 30]) for _ in range(count)]
    return [tuple(draw.choices(range(2, VOCABULARY_SIZE), k=length)) for length in lengths]


def request(prompt: tuple[int, ...], policy: DepthPolicy, max_tokens: int = NUM_NEW):
    stopping = StoppingParams(max_tokens=max_tokens)
    return GenerationRequest(prompt, policy=policy, stopping=stopping)


def all_tokens(handle) -> tuple[int, ...]:
    chunks = [event for event in handle.events() if isinstance(event, TokenChunk)]
    return tuple(token.token_id for chunk in chunks for token in chunk.tokens)


def blocks_taken(engine: Engine) -> int:
    gc.collect()
    runner = engine.runner
    assert isinstance(runner, PagedRunner)
    assert runner.records
    return runner.pool.num_blocks - runner.pool.num_free


def ladder_over(answers: dict[tuple[int, ...], tuple[int, ...]]) -> ScriptedLadder:
    """Drafts two right tokens, then a wrong one; its exits at layers are wrong at other places."""

    def right(context: list[int]) -> int:
        for prompt, answer in answers.items():
            if tuple(context[: len(prompt)]) == prompt:
                return (*answer, 0)[min(len(context) - len(prompt), len(answer))]
        raise AssertionError

    def table(context: list[int]) -> tuple[int, float] | None:
        step = len(context) % 4
        return None if step == 0 else (right(context) if step < 3 else 3, 0.9)

    def exits(context: list[int]) -> tuple[int, float]:
        return (right(context) if len(context) % 3 else 4, 0.95)

    return ScriptedLadder(table, exits, depths=(0, 2, 4))


def test_exact_is_full_is_the_models_own(own, engine):
    for prompt, answer in own.items():
        assert all_tokens(engine.submit(request(prompt, DepthPolicy("full")))) == answer
        handle = engine.submit(request(prompt, EXACT), ladder_over(own))  # type: ignore[arg-type]
        events = list(handle.events())
        tokens = [t.token_id for e in events if isinstance(e, TokenChunk) for t in e.tokens]
        assert tuple(tokens) == answer
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert 0 < finished.depth.num_accepted < finished.depth.num_drafted


@pytest.mark.full
def test_concurrent_requests_and_cancels_change_no_token_and_leave_no_block(engine):
    """More requests than fit into the budget at once, by two policies, some cancelled while they run."""
    rows = prompts(10)
    full = DepthPolicy("full")
    alone = {prompt: all_tokens(engine.submit(request(prompt, full))) for prompt in rows}
    handles = [
        engine.submit(request(p, EXACT), ladder_over(alone))  # type: ignore[arg-type]
        if number % 2
        else engine.submit(request(p, full))
        for number, p in enumerate(rows)
    ]
    for handle in handles[::4]:
        handle.next_event(30)
        handle.cancel()
    for number, (prompt, handle) in enumerate(zip(rows, handles, strict=True)):
        if number % 4:
            assert all_tokens(handle) == alone[prompt]
        else:
            while (event := handle.next_event(30)) is not None:
                last = event
            assert isinstance(last, Cancelled | Finished)
    assert engine.num_cached_tokens > 0
    assert blocks_taken(engine) * BLOCK_TOKENS == engine.num_cached_tokens
    # Two requests that need the whole budget together, and are too long to be kept themselves.
    for num_blocks in (8, 7):
        long = request(STEM, full, max_tokens=num_blocks * BLOCK_TOKENS - len(STEM))
        handles.append(engine.submit(long))
        handles[-1].pause()
    wait_until(lambda: engine.kv_usage_ratio == 1 and engine.num_cached_tokens == 0)
    for handle in handles:
        handle.cancel()
    wait_until(lambda: engine.num_running == 0)
    assert blocks_taken(engine) == 0


@pytest.mark.full
def test_a_prompt_with_a_cached_prefix_takes_over_blocks(loaded):
    question = (*STEM, 5, 6)
    other = (*STEM, 7, 8, 9)
    with paged_engine(loaded, shares_prefixes=False) as engine:
        expected = all_tokens(engine.submit(request(other, DepthPolicy("full"))))
    with paged_engine(loaded) as engine:
        all_tokens(engine.submit(request(question, DepthPolicy("full"))))
        events = list(engine.submit(request(other, DepthPolicy("full"))).events())
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.num_cached_tokens == len(STEM)
    tokens = [t.token_id for e in events if isinstance(e, TokenChunk) for t in e.tokens]
    assert tuple(tokens) == expected


@pytest.mark.full
def test_a_request_counts_by_whole_blocks(engine):
    assert engine.kv_budget_bytes == NUM_PAGES * BLOCK_TOKENS * engine.kv_token_bytes
    asked = request(STEM, DepthPolicy("full"), max_tokens=41)  # 81 positions are six blocks
    handle = engine.submit(asked)
    handle.pause()
    wait_until(lambda: engine.num_running == 1)
    assert engine.kv_usage_ratio == 6 / NUM_PAGES
    handle.resume()
    assert len(all_tokens(handle)) == 41


@pytest.mark.full
def test_exact_is_full_with_random_exits(own, engine):
    """A ladder's own exits with recorded passes."""
    ladder = random_ladder(engine.loaded, 4, (0, 2, 3), agreement=1.0)
    for prompt, answer in own.items():
        events = list(engine.submit(request(prompt, EXACT), ladder).events())
        tokens = [t.token_id for e in events if isinstance(e, TokenChunk) for t in e.tokens]
        assert tuple(tokens) == answer
        assert isinstance(events[-1], Finished)
        assert events[-1].depth.num_drafted > 0


def test_right_drafts_are_accepted_in_shared_passes():
    imposed = impose(SHAPES["tiny"], (2,), 0.9, accelerate=False)
    with fixed_cost_engine(imposed.loaded, imposed.ladder, kv_budget_bytes=1 << 21, runner_of=make_runner) as engine:
        prompts = [tuple(imposed.prompt(50 * number, 8)) for number in range(5)]
        stopping = StoppingParams(max_tokens=40, ignore_eos=True)
        handles = [engine.submit(GenerationRequest(prompt, policy=EXACT, stopping=stopping)) for prompt in prompts]
        for prompt, handle in zip(prompts, handles, strict=True):
            *chunks, finished = handle.events()
            tokens = [token.token_id for chunk in chunks for token in chunk.tokens]
            start = int((imposed.cycle == prompt[-1]).nonzero()) + 1
            assert tokens == imposed.prompt(start, 40)
            assert finished.depth.num_accepted > 0.5 * finished.depth.num_drafted


@pytest.mark.full
def test_a_caller_that_looks_for_prefixes_holds_no_blocks(loaded, monkeypatch):
    """Its thread looks how much of a prompt is known, and stands still there while the prefix is dropped."""
    monkeypatch.setattr(paged_runner, "RESERVED_TOKENS", BLOCK_TOKENS)
    looks, goes_on = threading.Event(), threading.Event()
    compare = prefixes_module.common_prefix

    def waiting(*pair):
        if threading.current_thread() is caller:
            looks.set()
            goes_on.wait(60)
        return compare(*pair)

    def ask():
        engine._num_cached(GenerationRequest(tuple(STEM)))

    caller = threading.Thread(target=ask)
    budget = (-(-(len(STEM) + NUM_NEW) // BLOCK_TOKENS)) * block_bytes(loaded)
    with fixed_cost_engine(loaded, kv_budget_bytes=budget, prefix_cache_bytes=budget, runner_of=make_runner) as engine:
        engine.generate(STEM, policy="full", max_tokens=NUM_NEW, ignore_eos=True)
        monkeypatch.setattr(prefixes_module, "common_prefix", waiting)
        caller.start()
        assert looks.wait(60)
        others = engine.generate(STEM[::-1], policy="full", max_tokens=NUM_NEW, ignore_eos=True)
        assert len(others.token_ids) == NUM_NEW
        goes_on.set()
        caller.join()
