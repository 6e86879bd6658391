"""Ladders that are bound to the model in memory, each with its drafter."""

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import replace

from shared.engine.background import Slices
from shared.engine.drafting.costs import CostMeter
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.self_test import check_drafts, self_test
from shared.errors import PreconditionFailed
from shared.ladder.ladder import BoundLadder, Ladder
from shared.model.runner import Runner

# Layouts of ladders for which the measured costs of exits are kept.
MAX_LAYOUTS = 64


class LadderCache:
    """Used by the engine's thread only. The costs of passes must be measured before a ladder is bound.

    `in_use` returns the id() of every ladder that a running request uses, `prepare_drafter` does in steps what remains
    to be done with a new one's drafter. If all that are bound take more than `max_bytes` of memory, of which what
    several have in common counts once, the least recently used of the others are dropped, `kept` last. `cost_meter`
    measures the costs of a ladder's exits. Any thread may read the figures, ask `has`, and set `kept`.
    """

    def __init__(self, runner: Runner, max_bytes: int, cost_meter: CostMeter | None = None) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.kept: Ladder | None = None
        self.in_use: Callable[[], Collection[int]] = lambda: ()
        self.prepare_drafter: Callable[[Drafter], Iterator[None]] = lambda drafter: iter(())
        self._runner = runner
        self._cost_meter = cost_meter or CostMeter()
        self._bound: OrderedDict[int, tuple[Ladder, Drafter]] = OrderedDict()
        # Those that are being bound, too.
        self._alive: weakref.WeakSet[BoundLadder] = weakref.WeakSet()
        # What each bound one keeps in memory, by address, and how many keep it.
        self._memory: dict[int, Mapping[int, int]] = {}
        self._num_holders: Counter[int] = Counter()
        self._largest = 0
        self._without: Drafter | None = None
        # By the ladder's layout: versions of a router rarely differ in it, and measuring takes many passes.
        self._exit_costs: OrderedDict[object, tuple[ExitCost, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Number of bound ladders."""
        return len(self._bound)

    def has(self, ladder: Ladder) -> bool:
        """Whether it is bound."""
        return id(ladder) in self._bound

    def has_room_for(self, count: int) -> bool:
        """Whether so many ladders as large as the largest so far could be bound beside the others."""
        return self.num_bytes + count * self._largest <= self.max_bytes

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
        `RouterMismatch`, `Corrupt` (reason SELF_TEST_FAILED), and `PreconditionFailed` (reason ROUTER_OVER_MEMORY).
        """
        if id(ladder) in self._bound:
            return
        bound = ladder.bind(self._runner, tuple(self._alive))
        self._alive.add(bound)
        self._check_size(bound)
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
        memory = self._check_size(bound)
        if id(ladder) in self._bound:  # two requests had it bound at once
            return
        # The ladder is referenced as long as its id() is a key, and what it keeps as long as its address is one.
        self._bound[id(ladder)] = (ladder, drafter)
        self._memory[id(ladder)] = memory
        self.num_bytes += sum(memory[address] for address in memory if not self._num_holders[address])
        self._num_holders.update(memory.keys())
        self._largest = max(self._largest, sum(memory.values()))
        self._drop_beyond(ladder)

    def evict_unused(self) -> None:
        """Drops ladders that are no longer in use, if all take too much memory."""
        self._drop_beyond()

    def _drop_beyond(self, newest: Ladder | None = None) -> None:
        if self.num_bytes <= self.max_bytes:
            return
        in_use = {*self.in_use(), id(newest)}
        for key in sorted((key for key in self._bound if key not in in_use), key=id(self.kept).__eq__):
            self._drop(key)
            if self.num_bytes <= self.max_bytes:
                return

    def _drop(self, key: int) -> None:
        memory = self._memory.pop(key)
        self._num_holders.subtract(memory.keys())
        gone = [address for address in memory if not self._num_holders[address]]
        for address in gone:
            del self._num_holders[address]
        self.num_bytes -= sum(memory[address] for address in gone)
        del self._bound[key]

    def _check_size(self, bound: BoundLadder) -> Mapping[int, int]:
        """What it keeps in memory. Raises `PreconditionFailed` if it alone is more than may be bound."""
        memory = bound.memory()
        num_bytes = sum(memory.values())
        if num_bytes > self.max_bytes:
            raise PreconditionFailed(
                f"the router takes {num_bytes / 2**20:.1f} MiB of memory, and routers may take "
                f"{self.max_bytes / 2**20:.1f} MiB (--router-memory-mb)",
                reason="ROUTER_OVER_MEMORY",
                metadata={"num_bytes": str(num_bytes), "max_bytes": str(self.max_bytes)},
            )
        return memory

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
