"""Times contenders, which take turns within each round, so that a busy machine slows all of them alike.

Ops are timed with cold caches, as in a verify pass: by the clock on a CPU, in CUDA graphs on a GPU.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Name = TypeVar("Name")
Contenders = Mapping[str, Callable[[], object]]
# Size of the memory that is read before each call, to evict the op's data from the cache ("sweep").
SWEPT_FLOATS = 16 << 20
# Calls per graph, each after a sweep.
CALLS_PER_GRAPH = 20


def seconds_of(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    run()
    return clock() - start


def timed(
    runs: Mapping[Name, Callable[[], object]],
    rounds: int,
    untimed: int = 1,
    timer: Callable[[Callable[[], object]], float] = seconds_of,
) -> dict[Name, list[float]]:
    """What `timer` says of each contender in each round, but for the first `untimed` rounds, which touch memory."""
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(untimed + rounds):
        for name, run in runs.items():
            samples[name].append(timer(run))
    return {name: times[untimed:] for name, times in samples.items()}


def medians_s(runs: Mapping[Name, Callable[[], object]], rounds: int, untimed: int = 1) -> dict[Name, float]:
    return {name: statistics.median(own) for name, own in timed(runs, rounds, untimed).items()}


class ClockStopwatch:
    """Reports lower quartiles, because others may be using the machine, and where torch has one thread, of the thread's
    own time. Reads 64 MB of other memory before every call."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._swept = torch.ones(SWEPT_FLOATS)

    def floor(self, num_bytes: float) -> Callable[[], object]:
        """All threads together read `num_bytes` bytes."""
        return torch.ones(max(int(num_bytes) // 4, 1)).sum

    def times_us(self, runs: Contenders) -> dict[str, float]:
        """Microseconds per call of each contender."""
        samples = timed(runs, self._rounds, 2, self._timed_s)
        return {name: statistics.quantiles(own, n=4)[0] * 1e6 for name, own in samples.items()}

    def _timed_s(self, run: Callable[[], object]) -> float:
        self._swept.sum()
        return seconds_of(run, time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)


class GraphStopwatch:
    """Captures graphs in which every call follows a read of twice the L2 cache's size.

    The time of a call is the graph's time minus that of a graph of the reads alone, divided by the calls; reported is
    the median. A contender that synchronises with the device cannot be captured: torch's error is raised.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        size = torch.cuda.get_device_properties().L2_cache_size
        # Read, not written: dirty cache lines would be written back during the next op.
        self._swept = torch.ones(max(2 * size // 4, SWEPT_FLOATS), device="cuda")
        self._sweep = self._swept_graph(lambda: None)

    def floor(self, num_bytes: float) -> Callable[[], object]:
        """A copy that reads half of `num_bytes` bytes and writes the other half."""
        source = torch.ones(max(int(num_bytes) // 2, 1), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def times_us(self, runs: Contenders) -> dict[str, float]:
        graphs = {name: self._swept_graph(run) for name, run in runs.items()}
        samples = timed(graphs, self._rounds, 2, self._call_us)
        return {name: statistics.median(own) for name, own in samples.items()}

    def _call_us(self, replay: Callable[[], object]) -> float:
        return (elapsed_us(replay) - elapsed_us(self._sweep)) / CALLS_PER_GRAPH

    def _swept_graph(self, run: Callable[[], object]) -> Callable[[], object]:
        """The replay of a graph of CALLS_PER_GRAPH calls."""

        def swept() -> None:
            self._swept.sum()
            run()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries create their plans and workspaces before the capture
                swept()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_PER_GRAPH):
                swept()
        return graph.replay


def elapsed_us(run: Callable[[], object]) -> float:
    """Microseconds that the work of one `run` takes on the current stream, by CUDA events. Synchronises."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000


def stopwatch(device: torch.device, rounds: int) -> ClockStopwatch | GraphStopwatch:
    return GraphStopwatch(rounds) if device.type == "cuda" else ClockStopwatch(rounds)
