"""Captured segments of a model as one CUDA graph: the deeper ones run only where the device itself says so.

    segments[0], then if counts[0] > 0: (segments[1], then if counts[1] > 0: (segments[2], ...))

A count is the `num_stays` that `shared.ops.exits.route` writes at the end of the segment before: where every token has left, the
deeper layers are passed over and the host has asked nothing. Needs CUDA's conditional nodes (12.4) and torch's `raw_cuda_graph`.
"""

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.errors import InvalidInput, PreconditionFailed
from shared.ops.library import load, runs_on

MINIMUM_DRIVER = 12040  # CUDA 12.4, as the driver counts


class Segment(Protocol):
    """What is needed of `torch.cuda.CUDAGraph(keep_graph=True)`, captured."""

    def raw_cuda_graph(self) -> int: ...


def _driver_version() -> int:
    version: int = torch.ops.neap.cuda_driver_version()
    return version


def check_support() -> None:
    """Raises `PreconditionFailed` where graphs cannot be composed: the library, the driver or torch is not fit for it."""
    load()
    if not runs_on("cuda"):
        raise PreconditionFailed(
            "neap's kernels were built without CUDA: graphs cannot be composed",
            reason="OPS_WITHOUT_CUDA",
        )
    version = _driver_version()
    if version < MINIMUM_DRIVER:
        raise PreconditionFailed(
            f"the driver knows CUDA {version // 1000}.{version % 1000 // 10} (0.0: there is none); conditional nodes want 12.4",
            reason="DRIVER_TOO_OLD",
        )
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        raise PreconditionFailed(
            f"torch {torch.__version__} does not hand out captured graphs (CUDAGraph.raw_cuda_graph)",
            reason="TORCH_TOO_OLD",
        )


def _free(handle: int) -> None:
    torch.ops.neap.free_graph(handle)


class ComposedGraph:
    """Segments composed by `compose`; holds them and their memory until `close`, or until it is dropped. For one thread at a time."""

    def __init__(
        self, handle: int, segments: Sequence[Segment], counts: Sequence[Tensor], device_index: int
    ) -> None:
        self._handle = handle
        self._free = weakref.finalize(self, _free, handle)
        self._free.atexit = False
        self._device_index = device_index
        # The nodes are copies, but what they read and write belongs to the segments' memory pools.
        self._held: tuple[object, ...] = (*segments, *counts)

    def replay(self) -> None:
        """Launches on torch's current stream. Raises `PreconditionFailed` once closed, `RuntimeError` for what CUDA says."""
        if not self._free.alive:
            raise PreconditionFailed("this composed graph is closed", reason="GRAPH_CLOSED")
        torch.ops.neap.replay_graph(self._handle, self._device_index)

    def close(self) -> None:
        """Destroys the graph; the caller has waited for its last replay. A second call does nothing."""
        self._held = ()
        self._free()

    def __enter__(self) -> "ComposedGraph":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compose(segments: Sequence[Segment], counts: Sequence[Tensor]) -> ComposedGraph:
    """N >= 2 captured segments and N - 1 counts, each [1] int64 on one GPU, written by the segment before.

    Segments may not draw random numbers: torch moves its generators only in its own replays. All but the first may hold kernels,
    copies and fills of the GPU's memory and nothing else, which is CUDA's rule for what depends on a condition. Raises `PreconditionFailed` as
    `check_support`, `InvalidInput` for wrong counts, `RuntimeError` with the name of the CUDA call that failed.
    """
    check_support()
    if len(segments) < 2 or len(counts) + 1 != len(segments):
        raise InvalidInput(f"{len(segments)} segments want one count less, not {len(counts)}")
    for index, count in enumerate(counts):
        if count.dtype != torch.int64 or count.numel() != 1 or count.device.type != "cuda":
            raise InvalidInput(
                f"count {index} must be one int64 on a GPU, not {list(count.shape)} {count.dtype} on {count.device}"
            )
    if len({count.device for count in counts}) > 1:
        raise InvalidInput("the counts are on different GPUs")
    device_index = counts[0].device.index
    handle: int = torch.ops.neap.compose_graphs(
        [segment.raw_cuda_graph() for segment in segments],
        [count.data_ptr() for count in counts],
        device_index,
    )
    return ComposedGraph(handle, segments, counts, device_index)
