"""Ladders that are bound to the model in memory, each with its drafter."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import replace

from shared.engine.background import Slices
from shared.engine.drafting.costs import CostMeter
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.self_test import check_drafts, self_test
from shared.ladder.ladder import BoundLadder, Ladder
from shared.model.runner import Runner

# Default number of ladders that are kept bound.
MAX_BOUND_LADDERS = 4
# Layouts of ladders for which the measured costs of exits are kept.
MAX_LAYOUTS = 64


class LadderCache:
    """Used by the engine's thread only. The costs of passes must be measured before a ladder is bound.

    `in_use` returns the id() of every ladder that a running request uses, `prepare_drafter` does in steps what remains
    to be done with a new one's drafter. If more than `max_ladders` are bound, the
    least recently used of the others are dropped. `cost_meter` measures the costs of a ladder's exits.
    """

    def __init__(
        self, runner: Runner, max_ladders: int = MAX_BOUND_LADDERS, cost_meter: CostMeter | None = None
    ) -> None:
        self.in_use: Callable[[], Collection[int]] = lambda: ()
        self.prepare_drafter: Callable[[Drafter], Iterator[None]] = lambda drafter: iter(())
        self._runner = runner
        self._max_ladders = max_ladders
        self._cost_meter = cost_meter or CostMeter()
        self._bound: OrderedDict[int, tuple[Ladder, Drafter]] = OrderedDict()
        self._without: Drafter | None = None
        # By the ladder's layout: versions of a router rarely differ in it, and measuring takes many passes.
        self._exit_costs: OrderedDict[object, tuple[ExitCost, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Number of bound ladders."""
        return len(self._bound)

    def find(self, ladder: Ladder | None, costs: PassCosts) -> Drafter | None:
        """The ladder's drafter, which plans by `costs`, or None if it is not bound. Without a ladder: a drafter that
        never drafts."""
        if ladder is None:
            if self._without is None or self._without.costs is not costs:
                self._without = Drafter(self._runner, costs)
            return self._without
        bound = self._bound.get(id(ladder))
        if bound is None:
            return None
        drafter = bound[1]
        if drafter.costs.verify is not costs.verify:  # they have been measured better since it was bound
            drafter = Drafter(self._runner, replace(costs, exits=drafter.costs.exits), drafter.ladder)
            self._bound[id(ladder)] = (ladder, drafter)
        self._bound.move_to_end(id(ladder))
        return drafter

    def prepare(self, ladder: Ladder, costs: PassCosts, *, self_tests: bool = True) -> Slices:
        """Binds and tests the ladder, in slices. Does nothing if it is bound already.

        A slice takes as long as the binding itself, one or two passes, or the recording of a pass. Raises
        `RouterMismatch` and `Corrupt` (reason SELF_TEST_FAILED).
        """
        if id(ladder) in self._bound:
            return
        bound = ladder.bind(self._runner)
        yield
        yield from self._runner.prepare(bound.depths)
        yield from bound.prepare()
        exits = self._exit_costs.get(bound.layout) if bound.depths else ()
        if exits is None:
            exits = yield from self._measured(bound)
        costs = replace(costs, exits=exits)
        if self_tests:
            yield from self_test(self._runner, bound, costs)
        drafter = Drafter(self._runner, costs, bound)
        yield from self.prepare_drafter(drafter)
        # Others are dropped first, so that there are never too many.
        # The ladder is referenced as long as its id() is a key.
        self._drop_beyond(self._max_ladders - 1)
        self._bound[id(ladder)] = (ladder, drafter)

    def evict_unused(self) -> None:
        """Drops ladders that are no longer in use, if too many are bound."""
        self._drop_beyond(self._max_ladders)

    def _drop_beyond(self, count: int) -> None:
        if len(self._bound) <= count:
            return
        in_use = self.in_use()
        spare = [key for key in self._bound if key not in in_use]
        for key in spare[: len(self._bound) - count]:
            del self._bound[key]

    def _measured(self, bound: BoundLadder) -> Generator[None, None, tuple[ExitCost, ...]]:
        timings = self._cost_meter.measure_exits(self._runner, bound)
        while True:
            try:
                index, drafted = next(timings)
            except StopIteration as stop:
                exits: tuple[ExitCost, ...] = stop.value
                break
            check_drafts(bound, index, drafted, self._runner.loaded.vocabulary_size)
            yield
        self._exit_costs[bound.layout] = exits
        if len(self._exit_costs) > MAX_LAYOUTS:
            self._exit_costs.popitem(last=False)
        return exits
