"""What prompts that start alike share, and what is let go when room is wanted."""

import dataclasses

import pytest
import torch

from inference_service.engine.engine import Engine
from inference_service.engine.memory.prefixes import MIN_SHARED, Prefixes, common_prefix
from inference_service.engine.request.request import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    StoppingParams,
    TokenChunk,
)
from shared.ladder.policy import DepthPolicy
from shared.model.cache import ContiguousCache
from shared.model.load import LoadedModel, wrap_model
from tests.families import build_family

LENGTH = 3 * MIN_SHARED
STEM = tuple(range(2, 2 + LENGTH))


@dataclasses.dataclass
class _Sequence:
    tokens: list[int]
    num_settled: int
    cache: ContiguousCache
    num_prompt_tokens: int = 0
    num_cached: int = 0


def sequence(tokens: list[int], *, num_settled: int = 0, fill: float = 0.0) -> _Sequence:
    """With one slot per token, keys `fill` and values -`fill` where settled."""
    cache = ContiguousCache(len(tokens))
    states = torch.full((1, 1, 1, 2), fill)
    keys, values = cache.stores(states, states, 0)
    keys[:, :, :num_settled] = fill
    values[:, :, :num_settled] = -fill
    return _Sequence(tokens, num_settled, cache, num_prompt_tokens=len(tokens))


def test_keys_and_values_of_the_common_beginning_are_copied_and_no_more():
    prefixes = Prefixes(1000)
    prefixes.insert(sequence([*STEM, 900, 901], num_settled=LENGTH + 1, fill=3.0))
    reader = sequence([*STEM[:20], 700, 701, 702])
    prefixes.match(reader, [])
    assert (reader.num_settled, reader.num_cached) == (20, 20)
    assert (reader.cache.keys[0][0, 0, :20] == 3).all()
    assert (reader.cache.values[0][0, 0, :20] == -3).all()
    assert (reader.cache.keys[0][0, 0, 20:] == 0).all()


def test_the_last_token_of_a_prompt_is_always_read():
    prefixes = Prefixes(1000)
    prefixes.insert(sequence([*STEM, 900], num_settled=LENGTH + 1, fill=3.0))
    reader = sequence(list(STEM))
    prefixes.match(reader, [])
    assert reader.num_settled == LENGTH - 1


def test_a_running_sequence_lends_only_what_it_has_settled():
    prefixes = Prefixes(1)
    donor = sequence([*STEM, 900], num_settled=MIN_SHARED + 4, fill=1.0)
    reader = sequence([*STEM, 800])
    prefixes.match(reader, [reader, donor])
    assert reader.num_settled == MIN_SHARED + 4
    donor.num_settled = MIN_SHARED + 8  # a few more are not worth a look
    prefixes.match(reader, [donor])
    assert reader.num_settled == MIN_SHARED + 4
    donor.num_settled = LENGTH
    prefixes.match(reader, [donor])
    assert reader.num_settled == reader.num_cached == LENGTH


def test_the_longest_beginning_wins_and_counts_as_used():
    prefixes = Prefixes(2 * LENGTH)
    short = sequence([*STEM[:20], *range(500, 500 + LENGTH - 20)], num_settled=LENGTH, fill=1.0)
    other = sequence(list(range(600, 600 + LENGTH)), num_settled=LENGTH, fill=2.0)
    prefixes.insert(short)
    prefixes.insert(other)
    reader = sequence([*STEM[:20], 1, 1, 1])
    prefixes.match(reader, [])
    assert reader.num_settled == 20
    prefixes.insert(sequence(list(range(800, 800 + LENGTH)), num_settled=LENGTH))
    assert prefixes.match_length(short.tokens) == LENGTH  # used last, so the other one went
    assert prefixes.match_length(other.tokens) == 0


def test_slots_are_bounded_and_given_up_on_demand():
    prefixes = Prefixes(2 * LENGTH)
    for start in range(0, 500, 100):
        prefixes.insert(sequence(list(range(start, start + LENGTH)), num_settled=LENGTH))
        assert prefixes.num_tokens <= 2 * LENGTH
    assert prefixes.num_tokens == 2 * LENGTH
    prefixes.insert(sequence(list(range(3 * LENGTH)), num_settled=3 * LENGTH))
    assert prefixes.num_tokens == 2 * LENGTH  # larger than all the room there is
    prefixes.fit(LENGTH)
    assert prefixes.match_length(list(range(400, 400 + LENGTH))) == LENGTH
    prefixes.fit(-5)
    assert prefixes.num_tokens == 0


def test_what_is_known_already_is_not_kept_twice():
    prefixes = Prefixes(1000)
    prefixes.insert(sequence(list(STEM), num_settled=20))
    prefixes.insert(sequence(list(STEM), num_settled=LENGTH))
    assert prefixes.num_tokens == LENGTH
    prefixes.insert(sequence(list(STEM), num_settled=30))
    assert prefixes.num_tokens == LENGTH
    assert prefixes.match_length(STEM) == LENGTH


def test_common_prefix():
    assert common_prefix([1, 2, 3], (1, 2, 4, 5)) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    torch.manual_seed(0)
    return wrap_model(build_family("llama"), accelerate=True)


def run(engine: Engine, prompt: tuple[int, ...], max_tokens: int = 6) -> tuple[list[int], Finished]:
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    request = GenerationRequest(prompt, stopping=stopping, policy=DepthPolicy("full"))
    tokens: list[int] = []
    event: GenerationEvent | None = None
    for event in engine.submit(request).events():
        if isinstance(event, TokenChunk):
            tokens += [token.token_id for token in event.tokens]
    assert isinstance(event, Finished)
    return tokens, event


def count_prompt_layers(engine: Engine, prompt: tuple[int, ...]) -> tuple[int, Finished]:
    """Layer executions in tokens of a request that generates one token."""
    counters = engine._decoder.runner.counters
    counters.reset()
    _, finished = run(engine, prompt, max_tokens=1)
    return counters.token_layers, finished


def test_a_second_request_reads_only_what_is_new(loaded):
    prompts = [(*STEM, 91, 92, 93), (*STEM, 94)]
    with Engine(loaded, prefix_cache_bytes=0) as engine:
        expected = [run(engine, prompt)[0] for prompt in prompts]
        assert run(engine, prompts[1])[1].num_cached_tokens == 0
    with Engine(loaded) as engine:
        first, second = (run(engine, prompt) for prompt in prompts)
        assert [first[0], second[0]] == expected
        assert (first[1].num_cached_tokens, second[1].num_cached_tokens) == (0, LENGTH)
        layers, finished = count_prompt_layers(engine, (*STEM, 95))
        assert layers == loaded.num_layers
        assert finished.num_cached_tokens == LENGTH


def test_a_conversation_goes_on_from_its_own_answer(loaded):
    with Engine(loaded) as engine:
        tokens, _ = run(engine, STEM, max_tokens=6)
        _, finished = run(engine, (*STEM, *tokens, 91, 92))
        # The answer's last token was chosen, and never read.
        assert finished.num_cached_tokens == LENGTH + 5


def test_requests_at_once_read_their_common_beginning_once(loaded):
    stopping = StoppingParams(max_tokens=3, ignore_eos=True)
    long_stem = STEM * 2
    with Engine(loaded) as engine:
        requests = [
            GenerationRequest((*long_stem, 91 + i), stopping=stopping, policy=DepthPolicy("full"))
            for i in range(6)
        ]
        handles = [engine.submit(request) for request in requests]
        finished = [list(handle.events())[-1] for handle in handles]
    cached = [event.num_cached_tokens for event in finished if isinstance(event, Finished)]
    assert cached == [0] + [len(long_stem)] * 5


def test_nothing_is_shared_where_that_is_turned_off(loaded):
    stopping = StoppingParams(max_tokens=3, ignore_eos=True)
    request = GenerationRequest((*STEM, 91), stopping=stopping, policy=DepthPolicy("full"))
    with Engine(loaded, prefix_cache_bytes=0) as engine:
        handles = [engine.submit(request) for _ in range(3)]
        finished = [list(handle.events())[-1] for handle in handles]
    assert [e.num_cached_tokens for e in finished if isinstance(e, Finished)] == [0, 0, 0]


def test_what_is_kept_makes_room_for_what_runs(loaded):
    with Engine(loaded) as probe:
        slot = probe._admission.kv_token_bytes
    budget = (LENGTH + 6 + 10) * slot
    with Engine(loaded, kv_budget_bytes=budget, prefix_cache_bytes=budget) as engine:
        run(engine, STEM)
        assert engine._decoder.prefixes.num_tokens == LENGTH + 6
        run(engine, tuple(range(60, 60 + 30)))  # fits only once the first is let go
        assert engine._decoder.prefixes.match_length(STEM) == 0
        assert engine._decoder.prefixes.num_tokens <= LENGTH + 16


def test_a_failed_step_leaves_nothing_behind(loaded, monkeypatch):
    with Engine(loaded) as engine:
        engine.warm_up()
        monkeypatch.setattr(engine._decoder, "step", _raise)
        with pytest.raises(Exception, match="failed inside"):
            run(engine, STEM)
        assert engine._decoder.prefixes.num_tokens == 0


def _raise(*_: object) -> None:
    raise RuntimeError("a kernel broke")
