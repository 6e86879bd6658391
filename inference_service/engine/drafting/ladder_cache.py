"""Ladders bound to the model in memory, each with its drafter."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Generator
from dataclasses import replace

from inference_service.engine.background import Slices
from inference_service.engine.drafting.costs import exit_timings
from inference_service.engine.drafting.drafter import Drafter
from inference_service.engine.drafting.planner import ExitCost, ExitGains, PassCosts
from inference_service.engine.quality.self_test import check_draft, self_test
from shared.ladder.ladder import BoundLadder, Ladder
from shared.model.runner import Runner

# Unless told otherwise, ladders kept bound beside those in use.
MAX_BOUND_LADDERS = 4
# Layouts of ladders whose exits' costs are remembered.
MAX_LAYOUTS = 64

Binding = tuple[BoundLadder | None, Drafter]


class LadderCache:
    """The engine's thread alone. `costs` of passes must be measured before anything is bound.

    Of the ladders not `in_use`, whose id() it tells, the least recently used are dropped as soon as more than `max_ladders` are
    bound.
    """

    def __init__(self, runner: Runner, max_ladders: int = MAX_BOUND_LADDERS) -> None:
        self.in_use: Callable[[], Collection[int]] = lambda: ()
        self._runner = runner
        self._max_ladders = max_ladders
        self._bound: OrderedDict[int, tuple[Ladder, Binding]] = OrderedDict()
        # Of exits, by the ladder's layout: versions of a router rarely differ in it, and measuring takes many passes.
        self._exit_costs: OrderedDict[object, tuple[ExitCost, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Ladders that are bound."""
        return len(self._bound)

    def find(self, ladder: Ladder | None, costs: PassCosts) -> Binding | None:
        """None where the ladder is not bound. Without a ladder nothing needs to be."""
        if ladder is None:
            return None, Drafter(self._runner, costs, ExitGains(()))
        found = self._bound.get(id(ladder))
        if found is None:
            return None
        self._bound.move_to_end(id(ladder))
        return found[1]

    def prepare(self, ladder: Ladder, costs: PassCosts, *, self_tests: bool = True) -> Slices:
        """Binds the ladder, unless it is, and tests it, in slices, none longer than the binding itself, a pass or two, or recording
        one.

        Raises RouterMismatch, Corrupt (SELF_TEST_FAILED).
        """
        if id(ladder) in self._bound:
            return
        bound = ladder.bind(self._runner)
        yield
        yield from self._runner.prepare(bound.depths)
        exits = self._exit_costs.get(bound.layout)
        if exits is None:
            exits = yield from self._measured(bound)
        if self_tests:
            yield from self_test(self._runner, bound, replace(costs, exits=exits))
        drafter = Drafter(self._runner, replace(costs, exits=exits), ExitGains(bound.agreements))
        # Room first, so that there are never more than there may be. The ladder stays referenced as long as its id is a key.
        self._drop_beyond(self._max_ladders - 1)
        self._bound[id(ladder)] = (ladder, (bound, drafter))

    def fit(self) -> None:
        """Drops what requests that have ended used, where that is too much."""
        self._drop_beyond(self._max_ladders)

    def _drop_beyond(self, count: int) -> None:
        if len(self._bound) <= count:
            return
        in_use = self.in_use()
        spare = [key for key in self._bound if key not in in_use]
        for key in spare[: len(self._bound) - count]:
            del self._bound[key]

    def _measured(self, bound: BoundLadder) -> Generator[None, None, tuple[ExitCost, ...]]:
        timings = exit_timings(self._runner, bound)
        while True:
            try:
                drafts = next(timings)
            except StopIteration as stop:
                exits: tuple[ExitCost, ...] = stop.value
                break
            for draft in drafts:
                check_draft(draft, self._runner.loaded.vocabulary_size)
            yield
        self._exit_costs[bound.layout] = exits
        if len(self._exit_costs) > MAX_LAYOUTS:
            self._exit_costs.popitem(last=False)
        return exits
