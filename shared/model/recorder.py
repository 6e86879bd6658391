"""Recording a pass once and running it again without its Python."""

from collections.abc import Callable
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


class NoRecorder:
    """Every replay is the work itself."""

    records = False

    def record(self, work: Work) -> Work:
        return work


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
            # Other threads may use the device meanwhile, for a router say. Where capturing fails, torch leaves its stream the current one.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(
                    graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                work()
        return graph.replay  # which holds the graph
