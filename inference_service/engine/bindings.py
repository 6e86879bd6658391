"""Ladders bound to the model in memory, each with its drafter."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from inference_service.engine.chores import Slices
from inference_service.engine.costs import exit_timings, measure_exits
from inference_service.engine.drafting import Drafter
from inference_service.engine.planner import ExitCost, ExitGains, PassCosts
from inference_service.engine.self_test import check_draft, self_test
from shared.ladder.ladder import BoundLadder, Ladder
from shared.model.runner import DepthRunner

# Kept bound beside those in use.
MAX_BOUND_LADDERS = 4

Binding = tuple[BoundLadder | None, Drafter]


class Bindings:
    """The engine's thread alone. `costs` of passes must be measured before anything is bound."""

    def __init__(self, runner: DepthRunner) -> None:
        self._runner = runner
        self._bound: OrderedDict[int, tuple[Ladder, Binding]] = OrderedDict()
        # Of exits, by the ladder's layout: versions of a router rarely differ in it, and measuring takes many passes.
        self._exit_costs: dict[object, tuple[ExitCost, ...]] = {}

    def get(self, ladder: Ladder | None, costs: PassCosts) -> Binding:
        """Binds the ladder now, unless it is: while requests run they wait for its exits to be measured."""
        if ladder is None:
            return None, Drafter(self._runner, costs, ExitGains(()))
        found = self._bound.get(id(ladder))
        if found is None:
            bound = ladder.bind(self._runner)
            for _ in self._runner.prepare(bound.depths):
                pass
            return self._keep(ladder, bound, costs, self._known(bound) or self._measured(bound))
        self._bound.move_to_end(id(ladder))
        return found[1]

    def prepare(self, ladder: Ladder, costs: PassCosts) -> Slices:
        """Binds and tests the ladder in slices, none longer than the binding itself, a pass or two, or recording one.

        Raises RouterMismatch, Corrupt (SELF_TEST_FAILED).
        """
        if id(ladder) in self._bound:
            return
        bound = ladder.bind(self._runner)
        yield
        yield from self._runner.prepare(bound.depths)
        exits = self._known(bound)
        if exits is None:
            timings = exit_timings(self._runner, bound)
            while exits is None:
                try:
                    for draft in next(timings):
                        check_draft(draft, self._runner.loaded.vocabulary_size)
                except StopIteration as stop:
                    exits = stop.value
                else:
                    yield
            self._exit_costs[bound.layout] = exits
        yield from self_test(self._runner, bound, replace(costs, exits=exits))
        self._keep(ladder, bound, costs, exits)

    def fit(self, in_use: Collection[int]) -> None:
        """Drops the least recently used beyond MAX_BOUND_LADDERS, but none whose id() is `in_use`."""
        spare = [key for key in self._bound if key not in in_use]
        for key in spare[: max(len(self._bound) - MAX_BOUND_LADDERS, 0)]:
            del self._bound[key]

    def _keep(
        self, ladder: Ladder, bound: BoundLadder, costs: PassCosts, exits: tuple[ExitCost, ...]
    ) -> Binding:
        drafter = Drafter(self._runner, replace(costs, exits=exits), ExitGains(bound.agreements))
        # The ladder stays referenced as long as its id is a key.
        self._bound[id(ladder)] = (ladder, (bound, drafter))
        return bound, drafter

    def _known(self, bound: BoundLadder) -> tuple[ExitCost, ...] | None:
        return self._exit_costs.get(bound.layout)

    def _measured(self, bound: BoundLadder) -> tuple[ExitCost, ...]:
        exits = self._exit_costs[bound.layout] = measure_exits(self._runner, bound)
        return exits
