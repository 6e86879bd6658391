"""The prefix cache: what is copied between requests, and what is dropped when memory is needed."""

import dataclasses
import random
from itertools import takewhile

import pytest
import torch

from shared.engine import step as step_module
from shared.engine.drafting.chains import Drafting
from shared.engine.engine import Engine
from shared.engine.memory.prefixes import MIN_SHARED, Prefixes, common_prefix, key_of, scope_key_of
from shared.engine.request.request import Finished, GenerationEvent, GenerationRequest, StoppingParams, TokenChunk
from shared.ladder.policy import DepthPolicy
from shared.ladder.tables import SequenceTables
from shared.model.cache import ContiguousCache
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.regimes import Regimes
from tests.families import build_family
from tests.fixed_costs import fixed_cost_engine
from tests.hooked_runner import HookedRunner
from tests.scripted_ladder import ScriptedLadder

LENGTH = 3 * MIN_SHARED
STEM = tuple(range(2, 2 + LENGTH))


@dataclasses.dataclass
class _Sequence:
    tokens: list[int]
    num_settled: int
    cache: ContiguousCache
    given_key: bytes
    read_length: int
    num_cached: int = 0
    num_read_before: int = 0
    scope_key: bytes = b""


def sequence(
    tokens: list[int], *, num_settled: int = 0, fill: float = 0.0, read_length: int = 0, scope: str = ""
) -> _Sequence:
    """With a cache of one position per token. Settled positions have keys `fill` and values -`fill`."""
    cache = ContiguousCache(len(tokens))
    states = torch.full((1, 1, 1, 2), fill)
    keys, values = cache.layer_tensors(states, states, 0)
    keys[:, :, :num_settled] = fill
    values[:, :, :num_settled] = -fill
    length = read_length or len(tokens)
    return _Sequence(tokens, num_settled, cache, key_of(tokens), length, scope_key=scope_key_of(scope))


def test_only_keys_and_values_of_the_common_prefix_are_copied():
    prefixes = Prefixes(1000)
    prefixes.insert(sequence([*STEM, 900, 901], num_settled=LENGTH + 1, fill=3.0))
    reader = sequence([*STEM[:20], 700, 701, 702])
    prefixes.match(reader, [], 1000)
    assert (reader.num_settled, reader.num_cached) == (20, 20)
    assert (reader.cache.keys[0][0, 0, :20] == 3).all()
    assert (reader.cache.values[0][0, 0, :20] == -3).all()
    assert not (reader.cache.keys[0][0, 0, 20:] == 3).any()


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize(
    ("read_length", "num_prompt_tokens", "num_copied"),
    [(20, 30, 29), (20, 40, 39), (45, 30, 0), (20, 60, 0), (45, 60, 59)],
)
def test_keys_are_shared_within_a_regime_only(read_length, num_prompt_tokens, num_copied, is_running):
    prefixes, tokens = Prefixes(1000, Regimes(starts=(1, 41))), list(range(2, 62))
    donor = sequence(tokens, num_settled=60, read_length=read_length)
    if not is_running:
        prefixes.insert(donor)
    reader = sequence([*tokens[: num_prompt_tokens - 1], 900])
    assert prefixes.is_being_computed(reader, [donor]) == bool(num_copied)
    assert prefixes.match_length(reader.given_key) == (0 if is_running else num_copied)
    prefixes.match(reader, [donor] if is_running else [], 1000)
    assert reader.num_settled == num_copied


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize(("of_donor", "of_reader"), [("", ""), ("a", "a"), ("a", "b"), ("a", ""), ("", "a")])
def test_keys_are_shared_within_a_scope_only(of_donor, of_reader, is_running):
    prefixes, tokens = Prefixes(1000), list(range(2, 62))
    donor = sequence(tokens, num_settled=60, fill=3.0, scope=of_donor)
    other = sequence(tokens, num_settled=30, scope="c")
    prefixes.insert(other)
    if not is_running:
        prefixes.insert(donor)
    reader = sequence([*tokens[:40], 900], scope=of_reader)
    num_copied = 40 if of_donor == of_reader else 0
    assert prefixes.is_being_computed(reader, [donor, other]) == bool(num_copied)
    found = prefixes.match_length(reader.given_key, reader.scope_key)
    assert found == (0 if is_running else num_copied)
    prefixes.match(reader, [donor, other] if is_running else [], 1000)
    assert (reader.num_settled, reader.num_cached) == (num_copied, num_copied)
    assert (reader.cache.keys[0][0, 0, :num_copied] == 3).all()


def test_a_cache_of_another_regime_is_kept_beside():
    prefixes, tokens = Prefixes(1000, Regimes(starts=(1, 41))), list(range(2, 62))
    for read_length in (20, 45):
        prefixes.insert(sequence(tokens, num_settled=60, read_length=read_length))
    assert prefixes.num_tokens == 120


def test_the_last_token_of_a_prompt_is_always_computed():
    prefixes = Prefixes(1000)
    prefixes.insert(sequence([*STEM, 900], num_settled=LENGTH + 1, fill=3.0))
    reader = sequence(list(STEM))
    prefixes.match(reader, [], 1000)
    assert reader.num_settled == LENGTH - 1


def test_only_settled_tokens_are_copied_from_a_running_sequence():
    prefixes = Prefixes(1)
    donor = sequence([*STEM, 900], num_settled=MIN_SHARED + 4, fill=1.0)
    reader = sequence([*STEM, 800])
    prefixes.match(reader, [reader, donor], 1000)
    assert reader.num_settled == MIN_SHARED + 4
    donor.num_settled = MIN_SHARED + 8  # a few more are not worth a look
    prefixes.match(reader, [donor], 1000)
    assert reader.num_settled == MIN_SHARED + 4
    donor.num_settled = LENGTH
    prefixes.match(reader, [donor], 1000)
    assert reader.num_settled == reader.num_cached == LENGTH


def test_the_longest_prefix_is_copied_and_counts_as_used():
    prefixes = Prefixes(2 * LENGTH)
    short = sequence([*STEM[:20], *range(500, 500 + LENGTH - 20)], num_settled=LENGTH, fill=1.0)
    other = sequence(list(range(600, 600 + LENGTH)), num_settled=LENGTH, fill=2.0)
    prefixes.insert(short)
    prefixes.insert(other)
    reader = sequence([*STEM[:20], 1, 1, 1])
    prefixes.match(reader, [], 1000)
    assert reader.num_settled == 20
    prefixes.insert(sequence(list(range(800, 800 + LENGTH)), num_settled=LENGTH))
    assert prefixes.match_length(key_of(short.tokens)) == LENGTH  # used last, so the other one went
    assert prefixes.match_length(key_of(other.tokens)) == 0


def test_kept_tokens_are_bounded_and_dropped_on_demand():
    prefixes = Prefixes(2 * LENGTH)
    for start in range(0, 500, 100):
        prefixes.insert(sequence(list(range(start, start + LENGTH)), num_settled=LENGTH))
        assert prefixes.num_tokens <= 2 * LENGTH
    assert prefixes.num_tokens == 2 * LENGTH
    prefixes.insert(sequence(list(range(3 * LENGTH)), num_settled=3 * LENGTH))
    assert prefixes.num_tokens == 2 * LENGTH  # larger than all the room there is
    prefixes.shrink_to(LENGTH)
    assert prefixes.match_length(key_of(list(range(400, 400 + LENGTH)))) == LENGTH
    prefixes.shrink_to(-5)
    assert prefixes.num_tokens == 0


def test_redundant_caches_are_not_kept():
    prefixes = Prefixes(1000)
    prefixes.insert(sequence(list(STEM), num_settled=20))
    prefixes.insert(sequence(list(STEM), num_settled=LENGTH))
    assert prefixes.num_tokens == LENGTH
    prefixes.insert(sequence(list(STEM), num_settled=30))
    assert prefixes.num_tokens == LENGTH
    assert prefixes.match_length(key_of(STEM)) == LENGTH


def test_common_prefix():
    assert common_prefix(key_of([1, 2, 3]), key_of((1, 2, 4, 5))) == 2
    assert common_prefix(key_of([1, 2]), key_of([1, 2, 3])) == 2
    assert common_prefix(key_of([]), key_of([1])) == 0


def test_keys_are_in_the_order_of_their_tokens():
    tokens = [(1,), (1, 2), (1, 255), (1, 256), (1, 1 << 16), (2,)]
    assert sorted(map(key_of, reversed(tokens))) == list(map(key_of, tokens))


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_found_among_many(seed):
    """Requests whose prompts have few kinds of tokens, so that they share prefixes of all lengths."""
    draw = random.Random(seed)
    prefixes = Prefixes(10_000)
    kept: list[list[int]] = []
    for _ in range(40):
        tokens = [draw.choice((1, 2, 300)) for _ in range(MIN_SHARED)]
        start = draw.choice(kept)[: draw.randrange(60)] if kept else []
        tokens = [*start, *tokens]
        prefixes.insert(sequence(tokens, num_settled=len(tokens)))
        kept.append(tokens)
        asked = [*draw.choice(kept)[: draw.randrange(60)], 7]
        pairs = [zip(asked, other, strict=False) for other in kept]
        expected = max(len(list(takewhile(lambda pair: pair[0] == pair[1], own))) for own in pairs)
        assert prefixes.match_length(key_of(asked)) == expected


def test_a_long_prefix_is_copied_in_parts():
    prefixes = Prefixes(1000)
    prefixes.insert(sequence([*STEM, 900], num_settled=LENGTH + 1, fill=3.0))
    reader = sequence([*STEM, 1])
    assert prefixes.match(reader, [], 0) == LENGTH
    assert prefixes.match(reader, [], 20) == LENGTH - 20
    assert (reader.cache.keys[0][0, 0, :20] == 3).all()
    assert not (reader.cache.keys[0][0, 0, 20:] == 3).any()
    # What is left is not worth a match of its own, so it is copied at once.
    assert prefixes.match(reader, [], LENGTH - 20 - MIN_SHARED + 1) == 0
    assert reader.num_settled == reader.num_cached == LENGTH


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
    counters = engine.runner.counters
    counters.reset()
    _, finished = run(engine, prompt, max_tokens=1)
    return counters.token_layers, finished


def test_a_second_request_computes_only_its_new_tokens(loaded):
    prompts = [(*STEM, 91, 92, 93), (*STEM, 94)]
    with fixed_cost_engine(loaded, prefix_cache_bytes=0) as engine:
        expected = [run(engine, prompt)[0] for prompt in prompts]
        assert run(engine, prompts[1])[1].num_cached_tokens == 0
    with fixed_cost_engine(loaded) as engine:
        first, second = (run(engine, prompt) for prompt in prompts)
        assert [first[0], second[0]] == expected
        assert (first[1].num_cached_tokens, second[1].num_cached_tokens) == (0, LENGTH)
        layers, finished = count_prompt_layers(engine, (*STEM, 95))
        assert layers == loaded.num_layers
        assert finished.num_cached_tokens == LENGTH


def test_a_conversation_reuses_the_cache_of_its_own_answer(loaded):
    with fixed_cost_engine(loaded) as engine:
        tokens, _ = run(engine, STEM, max_tokens=6)
        _, finished = run(engine, (*STEM, *tokens, 91, 92))
        # The answer's last token was chosen, and never read.
        assert finished.num_cached_tokens == LENGTH + 5


def test_concurrent_requests_compute_their_common_prefix_once(loaded):
    stopping = StoppingParams(max_tokens=3, ignore_eos=True)
    long_stem = STEM * 2
    with fixed_cost_engine(loaded) as engine:
        requests = [
            GenerationRequest((*long_stem, 91 + i), stopping=stopping, policy=DepthPolicy("full")) for i in range(6)
        ]
        handles = [engine.submit(request) for request in requests]
        finished = [list(handle.events())[-1] for handle in handles]
    cached = [event.num_cached_tokens for event in finished if isinstance(event, Finished)]
    assert cached == [0] + [len(long_stem)] * 5


def test_a_step_copies_and_shows_to_the_tables_no_more_than_its_share(loaded, monkeypatch):
    monkeypatch.setattr(step_module, "MAX_COPIED_TOKENS", 20)
    shown: list[tuple[int, ...]] = []
    copied: list[int] = []

    class Recording(SequenceTables):
        def append(self, tokens):
            shown.append(tuple(tokens))

    class RecordingLadder(ScriptedLadder):
        def tables(self, *arguments):
            return Recording(*arguments)

    copy = ContiguousCache.copy

    def counted(cache, other, start, end):
        copied.append(end - start)
        copy(cache, other, start, end)

    monkeypatch.setattr(ContiguousCache, "copy", counted)
    prompt = (*STEM, *range(60, 90), 91)
    with fixed_cost_engine(loaded) as engine:
        run(engine, prompt)
        asked = (*prompt[:-1], 92)
        request = GenerationRequest(asked, stopping=StoppingParams(max_tokens=1, ignore_eos=True))
        *_, finished = engine.submit(request, RecordingLadder()).events()  # type: ignore[arg-type]
        assert isinstance(finished, Finished)
        assert finished.num_cached_tokens == len(prompt) - 1
        assert copied == [20, 20, 20, 18]
        assert [len(tokens) for tokens in shown[:-1] if tokens] == [20, 20, 20, 18, 1]
        assert sum(shown[:-1], ()) == asked


def test_nothing_is_shared_where_that_is_turned_off(loaded):
    stopping = StoppingParams(max_tokens=3, ignore_eos=True)
    request = GenerationRequest((*STEM, 91), stopping=stopping, policy=DepthPolicy("full"))
    with fixed_cost_engine(loaded, prefix_cache_bytes=0) as engine:
        handles = [engine.submit(request) for _ in range(3)]
        finished = [list(handle.events())[-1] for handle in handles]
    assert [e.num_cached_tokens for e in finished if isinstance(e, Finished)] == [0, 0, 0]


def test_kept_caches_make_room_for_running_requests(loaded):
    with fixed_cost_engine(loaded) as probe:
        budget = (LENGTH + 6 + 10) * probe.kv_token_bytes
    with fixed_cost_engine(loaded, kv_budget_bytes=budget, prefix_cache_bytes=budget) as engine:
        run(engine, STEM)
        assert engine.num_cached_tokens == LENGTH + 6
        run(engine, tuple(range(60, 60 + 30)))  # fits only once the first is let go
        assert engine.num_cached_tokens == 30 + 6
        assert run(engine, STEM)[1].num_cached_tokens == 0


def test_a_failed_step_leaves_nothing_behind(loaded, monkeypatch):
    """The step fails outside of its passes, so the state of all its sequences is unknown."""

    def fail(*_: object) -> None:
        raise RuntimeError("no drafts")

    monkeypatch.setattr(Drafting, "draft", fail)
    with fixed_cost_engine(loaded) as engine:
        with pytest.raises(Exception, match="failed inside"):
            run(engine, STEM)
        assert engine.num_cached_tokens == 0


def test_a_failed_pass_leaves_nothing_behind(loaded):
    def fail_once(*_: object) -> None:
        del engine.runner.before["logits"]
        raise RuntimeError("a kernel broke")

    with fixed_cost_engine(loaded, runner_of=HookedRunner) as engine:
        engine.runner.before["logits"] = fail_once
        with pytest.raises(Exception, match="failed inside"):
            run(engine, STEM)
        assert engine.num_cached_tokens == 0
