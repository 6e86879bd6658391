"""Times ops with cold caches, as in a verify pass: by the clock on a CPU, in CUDA graphs on a GPU.

Contenders take turns within each round, so that a busy machine slows all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

Contenders = Mapping[str, Callable[[], object]]
# Size of the memory that is read before each call, to evict the op's data from the cache ("sweep").
SWEPT_FLOATS = 16 << 20
# Calls per graph, each after a sweep.
CALLS_PER_GRAPH = 20


class Stopwatch(Protocol):
    def floor(self, num_bytes: float) -> Callable[[], object]:
        """A contender that moves `num_bytes` bytes and does nothing else."""
        ...

    def times_us(self, runs: Contenders) -> dict[str, float]:
        """Microseconds per call of each contender."""
        ...


def stopwatch(device: torch.device, rounds: int) -> Stopwatch:
    return GraphStopwatch(rounds) if device.type == "cuda" else ClockStopwatch(rounds)


class ClockStopwatch:
    """Reports lower quartiles, because others may be using the machine. Reads 64 MB of other memory before every call."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._swept = torch.ones(SWEPT_FLOATS)

    def floor(self, num_bytes: float) -> Callable[[], object]:
        """All threads together read `num_bytes` bytes."""
        return torch.ones(max(int(num_bytes) // 4, 1)).sum

    def times_us(self, runs: Contenders) -> dict[str, float]:
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for index in range(self._rounds + 2):
            for name, run in runs.items():
                seconds = self._timed_s(run)
                if index >= 2:
                    samples[name].append(seconds * 1e6)
        return {name: statistics.quantiles(values, n=4)[0] for name, values in samples.items()}

    def _timed_s(self, run: Callable[[], object]) -> float:
        self._swept.sum()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class GraphStopwatch:
    """Captures graphs in which every call follows a read of twice the L2 cache's size.

    The time of a call is the graph's time minus that of a graph of the reads alone, divided by the calls; reported is the median. A
    contender that synchronises with the device cannot be captured: torch's error is raised.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        size = torch.cuda.get_device_properties().L2_cache_size
        # Read, not written: dirty cache lines would be written back during the next op.
        self._swept = torch.ones(max(2 * size // 4, SWEPT_FLOATS), device="cuda")
        self._sweep = self._swept_graph(lambda: None)

    def floor(self, num_bytes: float) -> Callable[[], object]:
        """A copy that reads half as many bytes and writes the other half."""
        source = torch.ones(max(int(num_bytes) // 2, 1), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def times_us(self, runs: Contenders) -> dict[str, float]:
        graphs = {name: self._swept_graph(run) for name, run in runs.items()}
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for index in range(self._rounds + 2):
            for name, graph in graphs.items():
                taken = elapsed_us(graph.replay) - elapsed_us(self._sweep.replay)
                if index >= 2:
                    samples[name].append(taken / CALLS_PER_GRAPH)
        return {name: statistics.median(values) for name, values in samples.items()}

    def _swept_graph(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        def swept() -> None:
            self._swept.sum()
            run()

        return captured(swept, CALLS_PER_GRAPH)


def captured(run: Callable[[], object], num_calls: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `num_calls` calls of `run`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries create their plans and workspaces before the capture
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            run()
    return graph


def elapsed_us(run: Callable[[], object]) -> float:
    """Microseconds that the work of one `run` takes on the current stream, by CUDA events. Synchronises."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000


def median_call_us(run: Callable[[], object], num_calls: int) -> float:
    """Microseconds per call if `run` makes `num_calls` calls: the median of several runs."""
    taken = [elapsed_us(run) / num_calls for _ in range(12)]
    return statistics.median(taken[2:])
