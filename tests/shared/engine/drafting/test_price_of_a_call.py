"""A call of an exit is charged once, with the costs of an H100: its further drafts are free there, and are made."""

import statistics
from collections.abc import Callable, Generator
from typing import Any

import pytest

from bench.answers import answer_all
from bench.imposed import SHAPES, impose
from shared.engine.drafting.costs import CostMeter
from shared.engine.drafting.drafter import Drafter, KeyTime
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.engine import Engine
from shared.ladder.ladder import BoundLadder
from shared.ladder.policy import DepthPolicy
from shared.model.paged_runner import PagedRunner
from shared.model.runner import Runner
from shared.ops.chains import Chains
from tests.recorders import TracingRecorder


class H100(CostMeter):
    """What a pass of 8 billion parameters took in bfloat16, and four drafts of a recorded chain."""

    def measure_passes(self, runner: Runner, *, between: Callable[[], None] = lambda: None) -> PassCosts:
        return PassCosts((7.23e-3,) * 9, wide=((16, 7.63e-3), (32, 9.2e-3), (64, 10.7e-3)))

    def measure_exits(
        self, runner: Runner, ladder: BoundLadder
    ) -> Generator[tuple[int, Chains], None, tuple[ExitCost, ...]]:
        yield from ()
        return (ExitCost(1.5e-3, 0.15e-3, 0.0, 4),)

    def seconds(self, work: Callable[[], None]) -> float:
        return 0.6e-3


@pytest.mark.full
@pytest.mark.parametrize(("num_requests", "least"), [(1, 3.1), (8, 2.4)])
def test_tokens_per_pass_of_an_exit_that_is_right_at_four_of_five(
    num_requests: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This machine is no H100.
    monkeypatch.setattr(Drafter, "record_call", lambda *_: None)
    monkeypatch.setattr(KeyTime, "record", lambda *_: None)
    imposed: Any = impose(SHAPES["tiny"], (0,), 0.8, accelerate=False)
    with Engine(
        imposed.loaded,
        imposed.ladder,
        max_running=num_requests,
        prefix_cache_bytes=0,
        cost_meter=H100(),
        runner_of=lambda loaded, _: PagedRunner(loaded, kv_budget_bytes=1 << 27, recorder=TracingRecorder()),
    ) as engine:
        prompts = [imposed.prompt(50 * number, 32) for number in range(num_requests)]
        answers = answer_all(engine, prompts, DepthPolicy("exact"), max_tokens=120, ignore_eos=True)
    depths = [answer.finished.depth for answer in answers]
    assert statistics.fmean(depth.num_tokens / depth.num_verify_passes for depth in depths) > least
