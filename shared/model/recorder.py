"""Records a pass once and replays it without running its Python again."""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

Work = Callable[[], None]


class Recorder(Protocol):
    """Makes work replayable.

    `records`: whether a replay runs only the device operations of the work.
    The host's decisions are then made once, at recording.
    """

    records: bool

    def record(self, work: Work) -> Work:
        """A function that repeats what `work` did, over the same tensors.
        `work` may run any number of times during this call.

        `work` reads and writes tensors that stay in place, and returns nothing. It must not wait for the device.
        """

    def close(self) -> None:
        """Frees the memory that recordings share. All recordings must have been dropped.
        Nothing is recorded afterwards."""


class NoRecorder:
    """Records nothing: a replay runs the work itself."""

    records = False

    def record(self, work: Work) -> Work:
        return work

    def close(self) -> None:
        pass


class CudaRecorder:
    """Records CUDA graphs that share one memory pool.
    They must be replayed one after another on one stream, as one engine does."""

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
                # Libraries create their handles and layers are compiled before the capture, where neither is allowed.
                work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may use the device during the capture, for example for a router. If the capture fails,
                # torch does not restore the current stream; the outer context does.
                with (
                    torch.cuda.stream(current),
                    torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"),
                ):
                    work()
            except BaseException:
                self._abandon()
                raise
        return graph.replay  # a bound method, so it keeps the graph alive

    def close(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def _abandon(self) -> None:
        """Releases the pool after a failed capture. If the capture could not be ended, torch would keep it for ever."""
        device = torch.cuda.current_device()
        # RuntimeError: the capture was ended and only the work failed, so nothing is left to do.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, self._memory)
            torch._C._cuda_releasePool(device, self._memory)
