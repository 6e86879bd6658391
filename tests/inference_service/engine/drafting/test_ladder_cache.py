"""New ladders are bound and tested between the steps of what runs."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from inference_service.engine.background import STEPS_PER_SLICE
from inference_service.engine.drafting import ladder_cache
from inference_service.engine.drafting.costs import exit_timings
from inference_service.engine.drafting.ladder_cache import MAX_BOUND_LADDERS
from inference_service.engine.engine import Engine
from inference_service.engine.request.request import GenerationRequest, StoppingParams
from shared.errors import Cancelled, Corrupt, RouterMismatch, Unavailable
from shared.ladder.policy import DepthPolicy
from shared.model.load import LoadedModel, wrap_model
from shared.model.runner import DepthRunner
from tests.families import build_family
from tests.scripted_ladder import ScriptedLadder

PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build_family("llama"))


@pytest.fixture(autouse=True)
def _measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here exits are timed as they are while serving, in many slices."""
    monkeypatch.setattr(ladder_cache, "exit_timings", exit_timings)


def request(**changes: object) -> GenerationRequest:
    stopping = StoppingParams(max_tokens=100, ignore_eos=True)
    return GenerationRequest(
        **{"prompt_ids": PROMPT, "policy": DepthPolicy("full"), "stopping": stopping, **changes}
    )


def exits(token: int = 3, probability: float = 0.5) -> ScriptedLadder:
    return ScriptedLadder(exits=lambda context: (token, probability), depths=(0, 1))


def test_what_was_prepared_is_bound_once_and_measured_once_per_layout(loaded, monkeypatch) -> None:
    measured: list[object] = []
    monkeypatch.setattr(
        ladder_cache, "exit_timings", lambda *args: measured.append(args) or exit_timings(*args)
    )
    first, second = exits(), exits()
    with Engine(loaded) as engine:
        engine.prepare(first)
        bound: list[object] = []
        monkeypatch.setattr(first, "bind", bound.append)
        engine.prepare(first)
        list(engine.submit(request(policy=DepthPolicy("exact")), first).events())
        assert bound == []
        engine.prepare(second)
        assert len(measured) == 1
        assert engine.statistics.num_requests == 1, "self-tests are counted nowhere"


def test_streams_go_on_while_a_ladder_is_prepared(loaded, monkeypatch) -> None:
    with Engine(loaded) as engine:
        order: list[str] = []
        step, slice_ = engine._decoder.step, engine._loop.background.run_slice
        monkeypatch.setattr(
            engine._decoder, "step", lambda *args: order.append("step") or step(*args)
        )
        monkeypatch.setattr(
            engine._loop.background, "run_slice", lambda: order.append("slice") or slice_()
        )
        handle = engine.submit(request())
        thread = threading.Thread(target=engine.prepare, args=(exits(),))
        thread.start()
        list(handle.events())
        thread.join(60)
        assert not thread.is_alive()
    slices = [index for index, name in enumerate(order) if name == "slice"]
    gaps = [later - earlier for earlier, later in pairwise(slices)]
    last_step = len(order) - 1 - order[::-1].index("step")
    while_running = [gap for at, gap in zip(slices[1:], gaps, strict=True) if at < last_step]
    assert len(while_running) > 5
    assert set(while_running) == {STEPS_PER_SLICE + 1}


@pytest.mark.parametrize(
    "ladder",
    [
        exits(token=10**6),
        exits(probability=float("nan")),
        exits(probability=1.5),
        ScriptedLadder(table=lambda context: (-1, 0.9)),
        ScriptedLadder(table=lambda context: {}["a bug"]),
    ],
)
def test_what_does_not_work_is_refused_and_harms_nobody(loaded, ladder) -> None:
    with Engine(loaded) as engine:
        handle = engine.submit(request())
        with pytest.raises(Corrupt) as raised:
            engine.prepare(ladder)
        assert raised.value.reason == "SELF_TEST_FAILED"
        assert sum(1 for _ in handle.events()) == 101
        engine.prepare(exits())


def test_preparing_ends_with_the_engine(loaded) -> None:
    engine = Engine(loaded)
    engine.warm_up()
    with pytest.raises(RouterMismatch):
        engine.prepare(ScriptedLadder(fingerprint="another"))
    engine.close()
    with pytest.raises(Unavailable):
        engine.prepare(exits())


def test_ladders_in_use_stay_bound_however_many(loaded, monkeypatch) -> None:
    ladders = [exits() for _ in range(MAX_BOUND_LADDERS + 2)]
    numbers = [0] * len(ladders)
    for index, ladder in enumerate(ladders):

        def bind(runner, index=index, ladder=ladder):
            numbers[index] += 1
            return ladder

        monkeypatch.setattr(ladder, "bind", bind)
    exact = request(
        policy=DepthPolicy("exact"), stopping=replace(request().stopping, max_tokens=40)
    )
    with Engine(loaded) as engine:
        handles = [engine.submit(exact, ladder) for ladder in ladders]
        for handle in handles:
            list(handle.events())
        assert numbers == [1] * len(ladders)
        list(engine.submit(exact, ladders[-1]).events())
        assert len(engine._ladders) == MAX_BOUND_LADDERS


def test_bound_ladders_stay_few_on_an_idle_engine(loaded) -> None:
    alive: weakref.WeakSet[ScriptedLadder] = weakref.WeakSet()
    with Engine(loaded, max_ladders=2) as engine:
        for _ in range(12):
            ladder = exits()
            alive.add(ladder)
            engine.prepare(ladder)
            del ladder
            gc.collect()
            assert len(alive) <= 2
            assert len(engine._ladders) <= 2


class SlowlyPrepared(DepthRunner):
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


def test_a_request_waits_for_its_own_ladder_and_nobody_else_does(loaded) -> None:
    """Between two slices of the binding the others are stepped."""
    steps: list[int] = []
    with Engine(
        loaded,
        runner_of=lambda loaded, _: SlowlyPrepared(
            loaded, lambda: steps.append(engine.statistics.num_generated_tokens)
        ),
    ) as engine:
        running = engine.submit(request())
        running.next_event(30)
        mine = engine.submit(request(policy=DepthPolicy("exact")), exits())
        assert sum(1 for _ in running.events()) == 100
        assert sum(1 for _ in mine.events()) == 101
    assert len(steps) == SlowlyPrepared.num_slices
    assert all(later > earlier for earlier, later in pairwise(steps)), steps


def test_a_cancelled_request_leaves_no_binding_behind(loaded) -> None:
    started = threading.Event()

    class NeverPrepared(SlowlyPrepared):
        num_slices = 1 << 62

    with Engine(loaded, runner_of=lambda loaded, _: NeverPrepared(loaded, started.set)) as engine:
        ladder = exits()
        alive = weakref.ref(ladder)
        waiting = engine.submit(request(policy=DepthPolicy("exact")), ladder)
        assert started.wait(60)
        waiting.cancel()
        with pytest.raises(Cancelled):
            list(waiting.events())
        del ladder, waiting
        engine.prepare(ScriptedLadder())  # runs after what is left of the cancelled binding
        gc.collect()
        assert alive() is None
