"""Records a pass once and replays it without running its Python again."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Indexing by a mask counts its elements on the device and reads the count on the host. Indexing by integers does not.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class HostSyncs(TorchDispatchMode):
    """Collects in `syncs` the names of operators whose result's size depends on numbers on the device, or which copy to
    or from the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.syncs: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self:  # a composite operator is judged by the operators that it consists of
            whole = func.namespace != "aten"
            parts = NotImplemented if whole else func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        out = func(*args, **(kwargs or {}))
        if self._is_sync(func, tree_leaves((args, kwargs)), out):
            self.syncs.append(str(func))
        return out

    @staticmethod
    def _is_sync(func: Any, inputs: list[Any], out: Any) -> bool:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        if func._overloadpacket.__name__ in _INDEXING:
            return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
        if _TAGS & set(func.tags):
            return True
        if func._overloadpacket.__name__ == "copy_":
            return tensors[0].device.type != tensors[1].device.type
        devices = {tensor.device.type for tensor in tensors}
        landed = {value.device.type for value in tree_leaves(out) if isinstance(value, Tensor)}
        # An operator may read a scalar from the host, but its result must be on the device of one of its inputs.
        return bool(devices) and bool(landed) and not (devices & landed)


def host_syncs(work: Callable[[], object]) -> list[str]:
    """Runs `work` and returns the names of the operators that make it wait for the device, in order."""
    mode = HostSyncs()
    with mode:
        work()
    return mode.syncs
