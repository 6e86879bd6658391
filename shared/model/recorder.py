"""Recording a pass once and running it again without its Python."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

Work = Callable[[], None]


class Recorder(Protocol):
    """`records`: whether replaying runs the work's device operations alone, so that whatever the host decides is decided once."""

    records: bool

    def record(self, work: Work) -> Work:
        """What does again what `work` did, over the same tensors. `work` itself may run none or several times by now.

        `work` reads and writes tensors that stay, and returns nothing; it must not wait for the device.
        """

    def close(self) -> None:
        """Gives back the memory that recordings shared. All of them must have been dropped; nothing is recorded afterwards."""


class NoRecorder:
    """Every replay is the work itself."""

    records = False

    def record(self, work: Work) -> Work:
        return work

    def close(self) -> None:
        pass


class CudaRecorder:
    """CUDA graphs that share one pool of memory: they are replayed one after another, on one stream, as one engine does."""

    records = True

    def __init__(self, device: torch.device) -> None:
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
            graph = torch.cuda.CUDAGraph()
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
        return graph.replay  # which holds the graph

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
