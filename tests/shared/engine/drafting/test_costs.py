"""On a device that works asynchronously, a measurement starts only when the device is idle."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shared.engine.drafting import costs
from shared.engine.drafting.costs import RememberingMeter, exit_timings, finished, verify_timings, wide_timings
from shared.engine.drafting.pass_costs import ExitCost
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from tests.families import build_family
from tests.paged import load_family
from tests.random_ladder import random_ladder
from tests.scripted_ladder import ScriptedLadder


class Watched(ContiguousRunner):
    """`under_way` is true from the start of a pass until one of its results has been read."""

    under_way = False

    def choices(self, states: Tensor) -> Tensor:
        self.under_way = True
        return super().choices(states)


def test_no_measurement_starts_while_a_pass_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Watched(load_family("llama"))
    clock, read = time.perf_counter, Tensor.tolist
    starts: list[bool] = []

    def reading(tensor: Tensor) -> object:
        runner.under_way = False
        return read(tensor)

    def started() -> float:
        starts.append(runner.under_way)
        return clock()

    monkeypatch.setattr(Tensor, "tolist", reading)
    monkeypatch.setattr(time, "perf_counter", started)
    ladder = ScriptedLadder(exits=lambda _: (4, 0.5), depths=(0, 2))
    with torch.inference_mode():
        finished(verify_timings(runner))
        for _ in exit_timings(runner, ladder):  # type: ignore[arg-type]
            pass
    assert len(starts) > 100
    assert not any(starts)


def _do_before_choices(runner: ContiguousRunner, work: Callable[[], None]) -> None:
    choices = runner.choices

    def late(states: Tensor) -> Tensor:
        work()
        return choices(states)

    runner.choices = late  # type: ignore[method-assign]


@pytest.mark.parametrize("pass_s", [0.0, 10.0])
def test_slow_passes_are_measured_less_often(monkeypatch: pytest.MonkeyPatch, pass_s: float) -> None:
    runner, now, passes = ContiguousRunner(load_family("llama")), [0.0], [0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(costs, "time", clock)

    def count() -> None:
        now[0] += pass_s
        passes[0] += 1

    _do_before_choices(runner, count)
    with torch.inference_mode():
        verify = finished(verify_timings(runner))
        verify_passes, passes[0] = passes[0], 0
        wide = finished(wide_timings(runner, verify))
    rounds = costs.REPEATS if pass_s == 0 else costs.MIN_REPEATS
    wide_rounds = costs.WIDE_REPEATS if pass_s == 0 else costs.MIN_WIDE_REPEATS
    assert verify_passes == rounds * costs.MAX_PASS_TOKENS
    assert passes[0] == wide_rounds * len(wide) > 0
    assert verify == (pass_s,) * costs.MAX_PASS_TOKENS


def test_exits_are_measured_after_a_context_that_has_been_read() -> None:
    """What a cache holds before it is written may be anything, a NaN for instance."""
    runner = ContiguousRunner(wrap_model(build_family("llama"), accelerate=True))
    ladder = random_ladder(runner.loaded, 0, (0, 2)).bind(runner)
    for _, drafted in exit_timings(runner, ladder):
        assert drafted.probabilities.isfinite().all()


def test_other_work_beside_a_measurement_does_not_change_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker measures once, at its start, and goes by it for as long as it lives.
    Here two repeats of three are slowed down."""
    now, counts = [0.0], {"passes": 0, "exits": 0}
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: 0.0)
    monkeypatch.setattr(costs, "time", clock)

    def work(kind: str, calls_per_repeat: int) -> None:
        repeat = counts[kind] // calls_per_repeat
        now[0] += 1.0 if repeat % 3 == 1 else 23.0
        counts[kind] += 1

    def ask(_: list[int]) -> tuple[int, float]:
        work("exits", 2 + costs.EXIT_CHAINS)
        return 4, 0.5

    runner = ContiguousRunner(load_family("llama"))
    ladder = ScriptedLadder(exits=ask, depths=(0,))
    timings = exit_timings(runner, ladder)  # type: ignore[arg-type]
    _do_before_choices(runner, lambda: work("passes", costs.MAX_PASS_TOKENS))
    with torch.inference_mode():
        verify = finished(verify_timings(runner))
        try:
            while True:
                next(timings)
        except StopIteration as stop:
            [found] = stop.value
    assert verify == (1.0,) * costs.MAX_PASS_TOKENS
    assert found == ExitCost(1.0, 1.0)


def test_a_first_start_begins_with_an_estimate_from_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, repeat = [0.0], [0]
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))
    runner = ContiguousRunner(load_family("llama"))
    choices = runner.choices

    def slow(states: Tensor) -> Tensor:
        repeat[0] += 1
        now[0] += 10.0 + 0.5 * states.shape[0] + (40.0 if repeat[0] <= 2 else 0.0)
        return choices(states)

    runner.choices = slow  # type: ignore[method-assign]
    found = RememberingMeter().measure_passes(runner)
    assert found.verify == pytest.approx([10.5 + 0.5 * index for index in range(costs.MAX_PASS_TOKENS)])
    assert repeat[0] == 2 * costs.ESTIMATE_REPEATS
    passes = costs.ESTIMATE_REPEATS * (1 + costs.MAX_PASS_TOKENS)
    assert runner.counters.token_layers == passes * runner.num_layers  # and none to fill a cache
