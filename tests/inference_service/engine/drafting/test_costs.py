"""On a device that works asynchronously, a measurement starts only when the device is idle."""

import time

import pytest
import torch
from torch import Tensor

from inference_service.engine.drafting.costs import exit_timings, measure_deep
from shared.model.contiguous_runner import ContiguousRunner
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
