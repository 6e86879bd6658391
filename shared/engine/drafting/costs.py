"""Measures the costs of passes and exits on this device.

A cost is the least of its repeats: what the work takes alone. Beside other processes, medians were up to six times as
high, and a worker goes by them for as long as it lives (docs/decisions/013).
"""

import math
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.ladder.exit_head import NUM_STATES
from shared.ladder.ladder import BoundLadder
from shared.memory import trim_heap
from shared.model.cache import KVCache
from shared.model.runner import Runner
from shared.ops.chains import Chains, ChainStart

T = TypeVar("T")

MAX_PASS_TOKENS = 9
# Cached tokens before those of a pass. Reading them takes a large model seconds.
CONTEXT_TOKENS = 32
REPEATS = 8
# Measurements of passes stop after this time, but not before MIN_REPEATS repeats.
MEASURE_S = 0.3
MIN_REPEATS = 3
# Passes of each size, for the estimate with which a first start begins.
ESTIMATE_REPEATS = 2
# Costs are measured anew after this time: other work on the machine may have slowed them down.
REMEMBERED_S = 7 * 86400.0
# Sizes of the passes that many sequences share, where a device has none of its own.
WIDE_PASS_TOKENS = (16, 32, 64)
WIDE_REPEATS = 3
MIN_WIDE_REPEATS = 1
# Chains of the call with which an exit's cost per further chain is measured, and drafts of one chain for the cost per
# further draft.
EXIT_CHAINS, EXIT_DRAFTS = 8, MAX_PASS_TOKENS - 1


class CostMeter:
    """Measures the costs that the planner weighs. A subclass may return costs that are known already."""

    def measure_passes(self, runner: Runner, *, between: Callable[[], None] = lambda: None) -> PassCosts:
        """The costs of passes with which an engine begins, without those of exits. Calls `between` before each pass; an
        exception that it raises ends the measurement."""
        return finished(pass_timings(runner), between)

    def measure_better(self, runner: Runner) -> Generator[None, None, PassCosts] | None:
        """Measures them while requests are served: yields wherever a step may run in between. None: those that
        `measure_passes` gives are as good."""
        return None

    def measure_exits(
        self, runner: Runner, ladder: BoundLadder
    ) -> Generator[tuple[int, Chains], None, tuple[ExitCost, ...]]:
        """The costs of a ladder's layer exits. See `exit_timings`."""
        return exit_timings(runner, ladder)

    def seconds(self, work: Callable[[], None]) -> float:
        """What `work`, which waits for the device, takes."""
        return min(_seconds(work) for _ in range(WIDE_REPEATS))


class RememberingMeter(CostMeter):
    """Begins with the costs of passes that an earlier start has measured, with the same build on the same machine, or
    else with an estimate from passes of two sizes. An estimate, and what is old, is measured while requests are
    served."""

    def measure_passes(self, runner: Runner, *, between: Callable[[], None] = lambda: None) -> PassCosts:
        known = _remembered(runner)
        if known is None:
            return PassCosts(finished(verify_estimate(runner), between))
        return PassCosts(tuple(known["deep"]), wide=tuple((count, seconds) for count, seconds in known["wide"]))

    def measure_better(self, runner: Runner) -> Generator[None, None, PassCosts] | None:
        known = _remembered(runner)
        if known is not None and 0 <= time.time() - known["measured_s"] < REMEMBERED_S:
            return None
        return self._measure_and_note(runner)

    def _measure_and_note(self, runner: Runner) -> Generator[None, None, PassCosts]:
        costs = yield from pass_timings(runner)
        known = {"deep": costs.verify, "wide": costs.wide, "measured_s": time.time()}
        runner.loaded.facts.note(_fact(runner), known)
        return costs


def _fact(runner: Runner) -> str:
    return f"costs, {runner.loaded.context_length}"


def _remembered(runner: Runner) -> dict[str, Any] | None:
    known: dict[str, Any] | None = runner.loaded.facts.earlier.get(_fact(runner))
    return known


def finished(timings: Generator[None, None, T], between: Callable[[], None] = lambda: None) -> T:
    """What a measurement returns. Calls `between` before each of its slices; an exception that it raises ends the
    measurement."""
    while True:
        between()
        try:
            next(timings)
        except StopIteration as stop:
            result: T = stop.value
            return result


def pass_timings(runner: Runner) -> Generator[None, None, PassCosts]:
    """Measures the costs of passes of all sizes. A pass per slice, as in all that follow."""
    verify = yield from verify_timings(runner)
    trim_heap()  # wide passes take the most memory of a start
    return PassCosts(verify, wide=(yield from wide_timings(runner, verify)))


def verify_estimate(runner: Runner) -> Generator[None, None, tuple[float, ...]]:
    """As `verify_timings`, from passes of the least and the most tokens alone, without cached ones before them."""
    verify_pass, widest = _verify_pass(runner, MAX_PASS_TOKENS, 0)
    seconds: dict[int, float] = {}
    for width in (1, widest) * ESTIMATE_REPEATS:
        yield
        seconds[width] = min(_seconds(partial(verify_pass, width)), seconds.get(width, math.inf))
    first, last = seconds[1], max(seconds[1], seconds[widest])
    return tuple(first + (last - first) * index / max(widest - 1, 1) for index in range(widest))


def verify_timings(runner: Runner, *, most_tokens: int = MAX_PASS_TOKENS) -> Generator[None, None, tuple[float, ...]]:
    """Measures seconds of a pass over 1..`most_tokens` tokens through all layers and the head, smoothed: see
    `smoothed`."""
    verify_pass, widest = _verify_pass(runner, most_tokens)
    rounds: list[list[float]] = []
    end = time.monotonic() + MEASURE_S
    while _go_on(len(rounds), MIN_REPEATS, REPEATS, end):
        rounds.append([])
        # Interleaved, so that a slow moment of the machine does not affect one width only.
        for width in range(1, widest + 1):
            yield
            rounds[-1].append(_seconds(partial(verify_pass, width)))
    return smoothed([min(column) for column in zip(*rounds, strict=True)])


def _verify_pass(runner: Runner, most_tokens: int, context: int = CONTEXT_TOKENS) -> tuple[Callable[[int], None], int]:
    """Runs a pass over so many tokens after `context` cached ones. And the most tokens that there is room for."""
    context = min(context, runner.loaded.context_length // 2)
    widest = min(most_tokens, runner.loaded.context_length - context)
    cache = runner.new_cache(context + widest)
    ids = torch.ones(1, context + widest, dtype=torch.long, device=runner.loaded.device)
    if context:
        runner.run(ids[:, :context], cache, first=0, last=runner.num_layers, base=0)

    def verify_pass(width: int) -> None:
        state = runner.run(ids[:, :width], cache, first=0, last=runner.num_layers, base=context)
        runner.choices(state[0]).tolist()

    return verify_pass, widest


def wide_timings(runner: Runner, verify: tuple[float, ...]) -> Generator[None, None, tuple[tuple[int, float], ...]]:
    """Measures (tokens, seconds) of passes over more tokens than `verify` has. The seconds never fall.
    () if the context is too short."""
    points: list[tuple[int, float]] = []
    least = verify[-1]
    for width in runner.pass_sizes or WIDE_PASS_TOKENS:
        if width >= runner.loaded.context_length:
            break
        cache = runner.new_cache(width)
        ids = torch.ones(1, width, dtype=torch.long, device=runner.loaded.device)

        def verify_pass(ids: Tensor = ids, cache: KVCache = cache) -> None:
            state = runner.run(ids, cache, first=0, last=runner.num_layers, base=0)
            runner.choices(state[0]).tolist()

        timings: list[float] = []
        end = time.monotonic() + MEASURE_S
        while _go_on(len(timings), MIN_WIDE_REPEATS, WIDE_REPEATS, end):
            yield
            timings.append(_seconds(verify_pass))
        least = max(least, min(timings))
        points.append((width, least))
    return tuple(points)


def smoothed(seconds: Sequence[float]) -> tuple[float, ...]:
    """Fits a line that never falls to the measured seconds of passes over 2, 3, .. tokens.

    Noise of a few percent would make single drafts look free or expensive. The pass over one token keeps its own figure
    if that is lower than the line: from two tokens on libraries use a matrix-matrix instead of a matrix-vector product,
    which may cost half a pass.
    """
    if len(seconds) < 3:
        return tuple(max(seconds[: index + 1]) for index in range(len(seconds)))
    slope, first = statistics.linear_regression(range(len(seconds) - 1), seconds[1:])
    if slope < 0:
        slope, first = 0.0, statistics.fmean(seconds[1:])
    line = [first + slope * index for index in range(len(seconds) - 1)]
    return min(seconds[0], first), *line


def exit_timings(
    runner: Runner, ladder: BoundLadder, *, repeats: int = REPEATS
) -> Generator[tuple[int, Chains], None, tuple[ExitCost, ...]]:
    """Measures, `repeats` times, the costs of calls of each layer exit: of one chain, of many, and of a long one.

    Yields the exit by number and its drafts after each measurement, so that the engine can step requests in between. A
    verify pass before each measurement evicts heads and tables from the processor's caches, as while serving. With warm
    caches they would seem half as expensive.
    """
    loaded = runner.loaded
    context = min(CONTEXT_TOKENS, loaded.context_length - 1)
    num_together = min(EXIT_CHAINS, loaded.context_length - context)
    cache = runner.new_cache(context + num_together)
    ids = torch.ones(1, context + num_together, dtype=torch.long, device=loaded.device)
    runner.run(ids[:, :context], cache, first=0, last=runner.num_layers, base=0)
    tokens = ids[:, :num_together]
    settled = torch.randn(num_together, NUM_STATES, loaded.hidden_size, device=loaded.device, dtype=loaded.model.dtype)

    def call_exit(index: int, depth: int, num_chains: int, room: int) -> Chains:
        entering: Sequence[Tensor | None] = [None] * num_chains
        if depth in ladder.state_depths:
            ids = tokens[:, :num_chains]
            states = runner.run(ids, cache, first=0, last=depth, base=context) if depth else runner.embed(ids, context)
            entering = states[0].split(1)
        starts = [
            ChainStart([1], 0, room, 1.0, 1.0, 0.0, state, begin)
            for state, begin in zip(entering, settled[:num_chains], strict=True)
        ]
        return ladder.propose(index, starts)

    next_token = tokens[:, :1]
    costs: list[ExitCost] = []
    for index, depth in enumerate(ladder.depths):
        alone, together, long = (1, 1), (num_together, 1), (1, EXIT_DRAFTS)
        seconds: dict[tuple[int, int], list[float]] = {alone: [], together: [], long: []}
        num_drafts = 1
        for _ in range(repeats + 1):
            for (num_chains, room), measured in seconds.items():
                state = runner.run(next_token, cache, first=0, last=runner.num_layers, base=context)
                # The read waits for the pass. Otherwise the exit's time on a GPU would include the rest of the pass.
                runner.choices(state[0]).tolist()
                start = time.perf_counter()
                drafted = call_exit(index, depth, num_chains, room)
                measured.append(time.perf_counter() - start)
                num_drafts = max(num_drafts, int(drafted.lengths[0]))
                yield index, drafted
        alone_s, together_s, long_s = (min(measured[1:]) for measured in seconds.values())
        each_more_s = max(together_s - alone_s, 0.0) / max(num_together - 1, 1)
        each_draft_s = max(long_s - alone_s, 0.0) / max(num_drafts - 1, 1)
        costs.append(ExitCost(alone_s, each_more_s, each_draft_s, num_drafts))
    return tuple(costs)


def _go_on(count: int, least: int, most: int, end: float) -> bool:
    """Whether to measure again after `count` times: no more once the time `end` has passed. The first ones may be slow,
    because their memory is new: the least is taken of all."""
    return count < least or (count < most and time.monotonic() < end)


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
