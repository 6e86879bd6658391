"""On a device that works asynchronously, a measurement starts only when the device is idle."""

import time
from collections import deque
from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_service.engine.drafting import costs
from inference_service.engine.drafting.costs import exit_timings, measure_deep, measure_wide
from inference_service.engine.drafting.planner import ExitCost
from shared.ladder.rungs import Draft
from shared.model.contiguous_runner import ContiguousRunner
from shared.ops.chains import ChainStart
from tests.paged import load_family
from tests.scripted_ladder import ScriptedLadder


class Watched(ContiguousRunner):
    """`under_way` is true from the start of a pass until one of its results has been read."""

    under_way = False

    def logits(self, state: Tensor) -> Tensor:
        self.under_way = True
        return super().logits(state)


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
        measure_deep(runner)
        for _ in exit_timings(runner, ladder):  # type: ignore[arg-type]
            pass
    assert len(starts) > 100
    assert not any(starts)


def test_a_further_draft_of_a_chain_is_measured_in_a_longer_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(costs, "CONTEXT_TOKENS", 8)
    runner = ContiguousRunner(load_family("llama"))
    ladder = ScriptedLadder(depths=(0,))
    ladder.whole_depth = 0
    asked: list[list[int]] = []

    def whole_chains(begins: Sequence[Tensor], starts: Sequence[ChainStart]) -> list[Any]:
        asked.append([start.room for start in starts])
        now[0] += 1.0 + len(starts) + 0.25 * starts[0].room
        return [[SimpleNamespace(draft=Draft(1, 0.5, "depth-0", 0))] for _ in starts]

    ladder.whole_chains = whole_chains  # type: ignore[attr-defined]
    found: list[ExitCost] = []

    def measured() -> Generator[list[Draft]]:
        found.extend((yield from exit_timings(runner, ladder)))  # type: ignore[arg-type]

    with torch.inference_mode():
        deque(measured(), maxlen=0)
    [cost] = found
    assert asked[:3] == [[1], [1] * costs.EXIT_TOKENS, [1 + costs.FURTHER_DRAFTS]]
    assert cost == ExitCost(2.25, 1.0, 0.25)


@pytest.mark.parametrize("pass_s", [0.0, 10.0])
def test_slow_passes_are_measured_less_often(
    monkeypatch: pytest.MonkeyPatch, pass_s: float
) -> None:
    runner, now, passes = ContiguousRunner(load_family("llama")), [0.0], [0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(costs, "time", clock)

    def count() -> None:
        now[0] += pass_s
        passes[0] += 1

    with torch.inference_mode():
        deep = measure_deep(runner, between=count)
        deep_passes, passes[0] = passes[0], 0
        wide = measure_wide(runner, deep, between=count)
    rounds = costs.REPEATS if pass_s == 0 else costs.MIN_REPEATS
    wide_rounds = costs.WIDE_REPEATS if pass_s == 0 else costs.MIN_WIDE_REPEATS
    assert deep_passes == (rounds + 1) * costs.MAX_PASS_TOKENS
    assert passes[0] == (wide_rounds + 1) * len(wide) > 0
    assert deep == (pass_s,) * costs.MAX_PASS_TOKENS
