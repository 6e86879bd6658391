"""New ladders are bound and tested between the steps of running requests."""

import gc
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch

from shared.engine.background import STEPS_PER_SLICE
from shared.engine.drafting.costs import exit_timings
from shared.engine.drafting.ladder_cache import LadderCache
from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.engine import Engine
from shared.engine.request.request import Finished
from shared.errors import Cancelled, Corrupt, PreconditionFailed, RouterMismatch, Unavailable
from shared.ladder.joint_weights import JointWeights
from shared.ladder.ladder import BoundLadder, Ladder
from shared.ladder.ngram_table import NgramTable
from shared.ladder.policy import DepthPolicy
from shared.ladder.proposers import Draft
from shared.ladder.table_confidence import SIZES, TableConfidence
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from shared.model.runner import Runner
from shared.ops.chains import ChainStart
from tests.fixed_costs import FixedCosts, fixed_cost_engine
from tests.known_answer import PROMPT, request
from tests.random_ladder import random_confidence, random_ladder
from tests.scripted_ladder import ScriptedLadder
from tests.tiers import tiered

EXACT = DepthPolicy("exact")


class MeasuredExits(FixedCosts):
    """Exits are timed as they are while serving, in many slices.
    Counts the measurements; calls `on_slice` in each slice."""

    def __init__(self, on_slice: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.num_measured = 0
        self._on_slice = on_slice

    def measure_exits(self, runner, ladder):
        self.num_measured += 1
        timings = exit_timings(runner, ladder)
        while True:
            self._on_slice()
            try:
                yield next(timings)
            except StopIteration as stop:
                return stop.value


def measuring_engine(loaded: LoadedModel) -> Engine:
    return fixed_cost_engine(loaded, cost_meter=MeasuredExits())


def exits(token: int = 3, probability: float = 0.5) -> ScriptedLadder:
    return ScriptedLadder(exits=lambda context: (token, probability), depths=(0, 1))


def test_a_ladder_is_bound_once_and_each_layout_measured_once(loaded, monkeypatch):
    costs = MeasuredExits()
    first, second = exits(), exits()
    with fixed_cost_engine(loaded, cost_meter=costs) as engine:
        engine.prepare(first)
        bound: list[object] = []
        monkeypatch.setattr(first, "bind", lambda *args: bound.append(args))
        engine.prepare(first)
        list(engine.submit(request(100, policy=EXACT), first).events())
        assert bound == []
        engine.prepare(second)
        assert costs.num_measured == 1
        assert engine.statistics.num_requests == 1, "self-tests are counted nowhere"


def test_drafts_are_rated_by_the_weights_of_their_own_ladder(loaded):
    runner, costs = ContiguousRunner(loaded), FixedCosts()
    cache, passes = LadderCache(runner, 1 << 30, costs), costs.measure_passes(runner)
    said = []
    for constant in (-2.0, 1.0):
        weights = JointWeights(exit_alone=(constant, 0.5, 0.0))
        ladder = replace(random_ladder(loaded, 0, (0,)), joint_weights=weights)
        for _ in cache.prepare(ladder, passes):
            pass
        drafter = cache.find(ladder, passes)
        [(*_, probability)] = drafter.confidence(request()).rate([Draft(7, 0.5, "depth-0", 0)])
        said.append(probability)
    assert said == pytest.approx([0.119, 0.731], abs=0.001)


class EstimatedCosts(FixedCosts):
    """Begins with passes that grow so much with each token that nothing is drafted. Later they do not."""

    def __init__(self) -> None:
        super().__init__(growth=10.0)

    def measure_better(self, runner: Runner) -> Generator[None, None, PassCosts]:
        yield
        return FixedCosts().measure_passes(runner)


def test_later_requests_are_planned_by_what_is_measured_while_serving(loaded):
    answers, drafted = [], []
    with fixed_cost_engine(loaded, ScriptedLadder(lambda _: (3, 0.99)), cost_meter=EstimatedCosts()) as engine:
        for _ in range(2):
            answers.append(engine.generate(PROMPT, policy=EXACT, max_tokens=12, ignore_eos=True).token_ids)
            drafted.append(sum(engine.statistics.drafted.values()))
            engine.measure_costs()
    assert answers[0] == answers[1]
    assert drafted[0] == 0 < drafted[1]


def test_streams_go_on_while_a_ladder_is_prepared(loaded):
    order: list[str] = []
    ended, held = threading.Event(), threading.Event()

    def on_event(event: object) -> None:  # one chunk per step
        order.append("step")
        held.wait(30)
        if event is None:
            ended.set()

    costs = MeasuredExits(lambda: order.append("slice"))
    with fixed_cost_engine(loaded, cost_meter=costs) as engine:
        engine.submit(request(100), on_event=on_event)
        thread = threading.Thread(target=engine.prepare, args=(exits(),))
        thread.start()
        held.set()
        assert ended.wait(30)
        thread.join(30)
        assert not thread.is_alive()
    slices = [index for index, name in enumerate(order) if name == "slice"]
    last_step = len(order) - 1 - order[::-1].index("step")
    gaps = [later - earlier for earlier, later in pairwise(slices) if later < last_step]
    assert len(gaps) > 5
    assert set(gaps) == {STEPS_PER_SLICE + 1}


WRONG = {
    "an exit's token": exits(token=10**6),
    "no number": exits(probability=float("nan")),
    "no probability": exits(probability=1.5),
    "a table's token": ScriptedLadder(table=lambda context: (-2, 0.9)),
}


@pytest.mark.parametrize("wrong", tiered(WRONG, {"a table's token"}))
def test_a_ladder_that_fails_its_self_test_is_refused_and_other_requests_go_on(loaded, wrong):
    with measuring_engine(loaded) as engine:
        handle = engine.submit(request(100))
        with pytest.raises(Corrupt) as raised:
            engine.prepare(WRONG[wrong])
        assert raised.value.reason == "SELF_TEST_FAILED"
        assert sum(1 for _ in handle.events()) == 101
        engine.prepare(exits())


def test_preparing_ends_with_the_engine(loaded):
    engine = measuring_engine(loaded)
    engine.warm_up()
    with pytest.raises(RouterMismatch):
        engine.prepare(ScriptedLadder(fingerprint="another"))
    engine.close()
    with pytest.raises(Unavailable):
        engine.prepare(exits())


def sized(num_bytes: int) -> ScriptedLadder:
    return ScriptedLadder(exits=lambda context: (3, 0.5), depths=(0, 1), num_bytes=num_bytes)


@pytest.mark.full
def test_ladders_in_use_stay_bound_however_much_they_take(loaded, monkeypatch):
    ladders = [sized(100) for _ in range(6)]
    numbers = [0] * len(ladders)
    for index, ladder in enumerate(ladders):

        def bind(runner, beside, index=index, ladder=ladder):
            numbers[index] += 1
            return ladder

        monkeypatch.setattr(ladder, "bind", bind)
    exact = request(40, policy=EXACT)
    with fixed_cost_engine(loaded, cost_meter=MeasuredExits(), ladder_bytes=450) as engine:
        handles = [engine.submit(exact, ladder) for ladder in ladders]
        for handle in handles:
            list(handle.events())
        assert numbers == [1] * len(ladders)
        list(engine.submit(exact, ladders[-1]).events())
        assert engine.ladders.num_bytes == 400


def test_the_least_recently_used_leave_as_far_as_memory_asks(loaded):
    alive: weakref.WeakSet[ScriptedLadder] = weakref.WeakSet()
    small = [sized(100) for _ in range(4)]
    with fixed_cost_engine(loaded, ladder_bytes=1000) as engine:
        for ladder in small:
            engine.prepare(ladder)
        engine.ladders.kept = small[0]
        list(engine.submit(request(4, policy=EXACT), small[1]).events())
        assert engine.ladders.has_room_for(6)
        assert not engine.ladders.has_room_for(7)
        engine.prepare(large := sized(750))
        held = [engine.ladders.has(ladder) for ladder in small]
        assert held == [True, True, False, False], "the one that is kept, and the one that was used last"
        assert engine.ladders.num_bytes == 950
        del large
        for _ in range(5):
            ladder = sized(400)
            alive.add(ladder)
            engine.prepare(ladder)
            del ladder
            gc.collect()
            assert len(alive) <= 2
            assert engine.ladders.num_bytes <= 1000
        assert engine.ladders.has(small[0])


def test_a_ladder_that_alone_takes_too_much_is_refused_and_the_others_stay(loaded):
    with fixed_cost_engine(loaded, ladder_bytes=1000) as engine:
        engine.prepare(fits := sized(1000))
        with pytest.raises(PreconditionFailed) as raised:
            engine.prepare(sized(1001))
        assert (raised.value.reason, raised.value.metadata["num_bytes"]) == ("ROUTER_OVER_MEMORY", "1001")
        with pytest.raises(PreconditionFailed):
            list(engine.submit(request(4, policy=EXACT), sized(1001)).events())
        assert engine.ladders.has(fits)


def pools(loaded: LoadedModel, count: int) -> list[Ladder]:
    """Ladders with one head, and confidences and tables of their own."""
    first = with_ngrams(random_ladder(loaded, 0, (0,)), 0)
    (exit_,) = first.exits
    others = (
        replace(with_ngrams(first, seed), exits=(replace(exit_, confidence=random_confidence(loaded, seed)),))
        for seed in range(1, count)
    )
    return [first, *others]


def with_ngrams(ladder: Ladder, seed: int) -> Ladder:
    generator = np.random.default_rng(seed)
    orders = []
    for size in (8, 16, 16, 8):
        keys = np.sort(generator.choice(1 << 32, size, replace=False))
        tokens = generator.integers(0, ladder.model.vocabulary_size, size)
        orders.append((keys, tokens, np.ones(size, np.int64), np.full(size, 128)))
    return replace(
        ladder,
        ngrams=NgramTable(orders),
        ngram_confidence=TableConfidence(0.0, [[0.0] * size for size in SIZES]),
    )


def tensors_of(*roots: object) -> dict[int, int]:
    """Address -> bytes of all tensors and arrays that can be reached from `roots`, but not through a model."""
    found: dict[int, int] = {}
    seen, ahead = set[int](), list(roots)
    while ahead:
        each = ahead.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | LoadedModel | ContiguousRunner):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, np.ndarray) and each.base is None:
            found[each.ctypes.data] = each.nbytes
        ahead += gc.get_referents(each)
    return {address: size for address, size in found.items() if size}


@pytest.mark.full
def test_two_hundred_pools_of_one_head_fit_where_twenty_whole_routers_do(loaded):
    ladders = pools(loaded, 200)
    runner, costs = ContiguousRunner(loaded), FixedCosts()
    passes = costs.measure_passes(runner)
    cache = LadderCache(runner, 1 << 40, costs)
    list(cache.prepare(ladders[0], passes))
    whole = cache.num_bytes
    cache.max_bytes = 20 * whole
    for ladder in ladders[1:]:
        list(cache.prepare(ladder, passes))
    assert len(cache) == 200
    drafters = [cache.find(ladder, passes) for ladder in ladders]
    embedding = loaded.parts.embedding.get_parameter("weight").untyped_storage().data_ptr()
    in_memory = tensors_of(*(drafter.ladder for drafter in drafters), ladders)
    in_memory.pop(embedding, None)
    assert cache.num_bytes == sum(in_memory.values()), "what is counted is what there is"
    # The parts leave with the last that has them.
    cache.max_bytes = whole
    cache.evict_unused()
    left = [ladder for ladder in ladders if cache.has(ladder)]
    assert left == ladders[-len(left) :]
    assert left
    assert cache.num_bytes <= whole
    cache.max_bytes = 0
    cache.evict_unused()
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_pools_that_share_a_head_draft_as_they_do_alone(loaded):
    runner = ContiguousRunner(loaded)
    begin = torch.randn(3, loaded.hidden_size)
    starts = [ChainStart((5,), 0, 4, 1.0, 1.0, 0.0, begin=begin)]
    beside: list[BoundLadder] = []
    for ladder in pools(loaded, 3):
        alone = ladder.bind(runner).propose(0, starts)
        beside.append(ladder.bind(runner, beside))
        for mine, other in zip(beside[-1].propose(0, starts), alone, strict=True):
            assert torch.equal(mine, other)
    said = {float(bound.propose(0, starts).probabilities[0, 0]) for bound in beside}
    assert len(said) > 1, "each by its own confidence head"


class SlowlyPrepared(ContiguousRunner):
    """Preparing passes between the depths of a ladder takes `num_slices` slices; `on_slice` is called before each."""

    num_slices = 5

    def __init__(self, loaded: LoadedModel, on_slice: Callable[[], object]) -> None:
        super().__init__(loaded)
        self._on_slice = on_slice

    def prepare(self, depths: Sequence[int]) -> Iterator[None]:
        number = 0
        while depths and number < self.num_slices:
            self._on_slice()
            yield
            number += 1


def test_a_request_waits_for_its_own_ladder_and_nobody_else_does(loaded):
    """Between two slices of the binding the others are stepped."""
    steps: list[int] = []
    with fixed_cost_engine(
        loaded,
        runner_of=lambda loaded, _: SlowlyPrepared(
            loaded, lambda: steps.append(engine.statistics.num_generated_tokens)
        ),
    ) as engine:
        running = engine.submit(request(100))
        running.next_event(30)
        mine = engine.submit(request(100, policy=EXACT), exits())
        for handle in (running, mine):
            *_, finished = handle.events()
            assert isinstance(finished, Finished)
            assert finished.num_completion_tokens == 100
    assert len(steps) == SlowlyPrepared.num_slices
    assert all(later > earlier for earlier, later in pairwise(steps)), steps


def test_a_cancelled_request_leaves_no_binding_behind(loaded):
    started = threading.Event()

    class NeverPrepared(SlowlyPrepared):
        num_slices = 1 << 62

    with fixed_cost_engine(loaded, runner_of=lambda loaded, _: NeverPrepared(loaded, started.set)) as engine:
        ladder = exits()
        alive = weakref.ref(ladder)
        waiting = engine.submit(request(100, policy=EXACT), ladder)
        assert started.wait(60)
        waiting.cancel()
        with pytest.raises(Cancelled):
            list(waiting.events())
        del ladder, waiting
        engine.prepare(ScriptedLadder())  # runs after what is left of the cancelled binding
        gc.collect()
        assert alive() is None
