"""What is measured is what was meant: on a device that works while the host goes on, a clock starts when it is idle."""

import time

import pytest
import torch
from torch import Tensor

from inference_service.engine.drafting.costs import exit_timings, measure_deep
from shared.model.contiguous_runner import ContiguousRunner
from tests.paged import load_family
from tests.scripted_ladder import ScriptedLadder


class Watched(ContiguousRunner):
    """Notes when passes are begun; `under_way` until a number of what they gave has been read."""

    under_way = False

    def logits(self, state: Tensor) -> Tensor:
        self.under_way = True
        return super().logits(state)


def test_no_clock_starts_while_a_pass_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
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
