"""Measuring what passes cost on this device, once, at start-up."""

import statistics
import time
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from inference_service.engine.drafting.planner import ExitCost
from shared.ladder.ladder import BoundLadder
from shared.ladder.rungs import Draft
from shared.model.cache import KVCache
from shared.model.runner import Runner

MAX_PASS_TOKENS = 9
CONTEXT_TOKENS = 128
REPEATS = 8
# Passes of many sequences.
WIDE_PASS_TOKENS = (16, 32, 64)
WIDE_REPEATS = 3
# Tokens that an exit's cost in company is measured with.
EXIT_COMPANY = 8


def measure_deep(
    runner: Runner, *, between: Callable[[], None] = lambda: None
) -> tuple[float, ...]:
    """Seconds of a pass over 1..MAX_PASS_TOKENS tokens through all layers and the head, smoothed: see `smoothed`.

    `between` is called before each pass; what it raises ends the measurement.
    """
    context = min(CONTEXT_TOKENS, runner.loaded.context_length // 2)
    widest = min(MAX_PASS_TOKENS, runner.loaded.context_length - context)
    cache = runner.new_cache(context + widest)
    ids = torch.ones(1, context + widest, dtype=torch.long, device=runner.loaded.device)
    runner.run(ids[:, :context], cache, first=0, last=runner.num_layers, base=0)

    def deep_pass(width: int) -> None:
        between()
        state = runner.run(ids[:, :width], cache, first=0, last=runner.num_layers, base=context)
        runner.logits(state[0]).argmax(-1).tolist()

    # Interleaved, so that a slow moment of the machine does not fall on one width.
    rounds = [
        [_seconds(lambda width=width: deep_pass(width)) for width in range(1, widest + 1)]  # type: ignore[misc]
        for _ in range(REPEATS + 1)
    ]
    medians = [statistics.median(column) for column in zip(*rounds[1:], strict=True)]
    return smoothed(medians)


def measure_wide(
    runner: Runner, deep: tuple[float, ...], *, between: Callable[[], None] = lambda: None
) -> tuple[tuple[int, float], ...]:
    """(tokens, seconds) of wider passes than `deep` has, never falling; () where the context is too short. `between` as there."""
    points: list[tuple[int, float]] = []
    least = deep[-1]
    for width in WIDE_PASS_TOKENS:
        if width >= runner.loaded.context_length:
            break
        cache = runner.new_cache(width)
        ids = torch.ones(1, width, dtype=torch.long, device=runner.loaded.device)

        def deep_pass(ids: Tensor = ids, cache: KVCache = cache) -> None:
            between()
            state = runner.run(ids, cache, first=0, last=runner.num_layers, base=0)
            runner.logits(state[0]).argmax(-1).tolist()

        seconds = statistics.median([_seconds(deep_pass) for _ in range(WIDE_REPEATS + 1)][1:])
        least = max(least, seconds)
        points.append((width, least))
    return tuple(points)


def smoothed(seconds: Sequence[float]) -> tuple[float, ...]:
    """Measured seconds of passes over 1, 2, .. tokens -> a straight line from two tokens on, never falling.

    Noise of a few percent would make single drafts look free or dear. A pass over one token keeps its own figure where that is
    lower: libraries switch from a matrix-vector to a matrix-matrix product there, which may cost half a pass.
    """
    if len(seconds) < 3:
        return tuple(max(seconds[: index + 1]) for index in range(len(seconds)))
    slope, first = statistics.linear_regression(range(len(seconds) - 1), seconds[1:])
    if slope < 0:
        slope, first = 0.0, statistics.fmean(seconds[1:])
    line = [first + slope * index for index in range(len(seconds) - 1)]
    return min(seconds[0], first), *line


def exit_timings(
    runner: Runner, ladder: BoundLadder
) -> Generator[list[Draft], None, tuple[ExitCost, ...]]:
    """What taking tokens from the embedding to each layer exit and through its head and router costs; yields what each timed exit
    said, so that other work may come between.

    Before each a deep pass drives heads and tables out of the caches, as it does while serving: warm, they seem half as dear.
    """
    loaded = runner.loaded
    context = min(CONTEXT_TOKENS, loaded.context_length - 1)
    company = min(EXIT_COMPANY, loaded.context_length - context)
    cache = runner.new_cache(context + company)
    tokens = torch.ones(1, company, dtype=torch.long, device=loaded.device)
    deep_states = torch.randn(
        company, loaded.hidden_size, device=loaded.device, dtype=loaded.model.dtype
    )

    def leave(index: int, depth: int, count: int) -> list[Draft]:
        own = tokens[:, :count]
        if depth:
            states = runner.run(own, cache, first=0, last=depth, base=context)
        else:
            states = runner.embed(own, context)
        return ladder.ask(index, states[0], deep_states[:count], [1] * count)

    one = tokens[:, :1]
    costs: list[ExitCost] = []
    for index, depth in enumerate(ladder.depths):
        seconds: dict[int, list[float]] = {1: [], company: []}
        for _ in range(REPEATS + 1):
            for count, taken in seconds.items():
                state = runner.run(one, cache, first=0, last=runner.num_layers, base=context)
                # Read back, or on a GPU the exit would be charged with the pass that still runs.
                runner.logits(state[0]).argmax(-1).tolist()
                start = time.perf_counter()
                drafts = leave(index, depth, count)
                taken.append(time.perf_counter() - start)
                yield drafts
        alone_s, together_s = (statistics.median(seconds[n][1:]) for n in (1, company))
        each_more_s = max(together_s - alone_s, 0.0) / max(company - 1, 1)
        costs.append(ExitCost(alone_s, each_more_s))
    return tuple(costs)


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
