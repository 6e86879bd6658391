"""Recording a pass once and running it again without its Python."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from shared.ops.conditional import check_support, compose

Work = Callable[[], None]


class Recorder(Protocol):
    """`records`: whether replaying runs the work's device operations alone, so that whatever the host decides is decided once.
    `composes`: whether recordings can be joined by conditions that the device decides."""

    records: bool
    composes: bool

    def record(self, work: Work) -> Work:
        """What does again what `work` did, over the same tensors. `work` itself may run none or several times by now.

        `work` reads and writes tensors that stay, and returns nothing; it must not wait for the device.
        """

    def compose(self, recordings: Sequence[Work], counts: Sequence[Tensor]) -> Work:
        """`recordings`, two or more that `record` has made: each but the first runs only if the count [1] int64 that stands before it is
        positive by then, and with it all behind it. Only where `composes`."""

    def close(self) -> None:
        """Gives back the memory that recordings shared. All of them must have been dropped; nothing is recorded afterwards."""


class NoRecorder:
    """Every replay is the work itself."""

    records = False
    composes = False

    def record(self, work: Work) -> Work:
        return work

    def compose(self, recordings: Sequence[Work], counts: Sequence[Tensor]) -> Work:
        raise NotImplementedError("nothing is recorded")

    def close(self) -> None:
        pass


class Recording:
    """A captured graph: calling it replays it."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph

    def __call__(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """CUDA graphs that share one pool of memory: they are replayed one after another, on one stream, as one engine does.

    With `composes` they can be composed by conditional nodes: raises `PreconditionFailed`, as `shared.ops.conditional` does, where
    driver, torch or library are too old for that.
    """

    records = True

    def __init__(self, device: torch.device, *, composes: bool = False) -> None:
        if composes:
            check_support()
        self.composes = composes
        self._device = device
        with torch.cuda.device(device):
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    def record(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()  # libraries make their handles, compiled layers compile: neither may happen while a graph is captured
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph(keep_graph=self.composes)
            try:
                # Other threads may use the device meanwhile, for a router say. Where capturing fails, torch leaves its stream the
                # current one.
                with (
                    torch.cuda.stream(current),
                    torch.cuda.graph(
                        graph,
                        pool=self._memory,
                        stream=self._stream,
                        capture_error_mode="thread_local",
                    ),
                ):
                    work()
            except BaseException:
                self._abandon()
                raise
            if self.composes:
                graph.instantiate()
        return Recording(graph)

    def compose(self, recordings: Sequence[Work], counts: Sequence[Tensor]) -> Work:
        graphs = []
        for recording in recordings:
            assert isinstance(recording, Recording)
            graphs.append(recording.graph)
        with torch.cuda.device(self._device):
            return compose(graphs, counts).replay

    def close(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def _abandon(self) -> None:
        """After a capture that failed. Where it cannot be ended, torch neither stops allocating for it nor counts its graph out, and
        the pool would never be freed."""
        device = torch.cuda.current_device()
        with suppress(
            RuntimeError
        ):  # the capture was ended and only the work failed: nothing is left to do
            torch._C._cuda_endAllocateToPool(device, self._memory)
            torch._C._cuda_releasePool(device, self._memory)
