"""Finds the operators that make the host wait for the device, or that depend on numbers on it.
Such passes cannot be recorded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
