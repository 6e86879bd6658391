"""Engines whose planner does not depend on how fast this machine is."""

from collections.abc import Callable, Generator
from typing import Any

from shared.engine.drafting.costs import CostMeter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.engine import Engine
from shared.ladder.ladder import BoundLadder, Ladder
from shared.model.loaded import LoadedModel
from shared.model.runner import Runner
from shared.ops.chains import Chains


class FixedCosts(CostMeter):
    """Measures nothing. With these costs drafting always pays, unless each token lets a pass grow by much more."""

    def __init__(self, wide: tuple[tuple[int, float], ...] = (), growth: float = 0.001) -> None:
        self._wide, self._growth = wide, growth

    def measure_passes(self, runner: Runner, *, between: Callable[[], None] = lambda: None) -> PassCosts:
        return PassCosts(tuple(1.0 + self._growth * n for n in range(9)), wide=self._wide)

    def measure_exits(
        self, runner: Runner, ladder: BoundLadder
    ) -> Generator[tuple[int, Chains], None, tuple[ExitCost, ...]]:
        yield from ()
        return (ExitCost(0.001, 0.0001),) * len(ladder.depths)

    def seconds(self, work: Callable[[], None]) -> float:
        return 0.0


def fixed_cost_engine(loaded: LoadedModel, ladder: Ladder | Any = None, **options: Any) -> Engine:
    """An engine with `FixedCosts`, unless `cost_meter` is given."""
    return Engine(loaded, ladder, **{"cost_meter": FixedCosts(), **options})
