"""Finding what makes the host wait for the device, or decides from numbers on it: neither can be recorded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Indexing is by numbers, or by a mask: then it counts on the device and tells the host.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class HostSyncs(TorchDispatchMode):
    """`found` names the operators under this mode whose result or its size is read from the device's numbers, or moved to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with self:  # what is made of other operators is judged by these
            whole = func.namespace != "aten"
            parts = NotImplemented if whole else func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        out = func(*args, **(kwargs or {}))
        if self._is_sync(func, tree_leaves((args, kwargs)), out):
            self.found.append(str(func))
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
        # Numbers on the host may take part in an operator; nothing may cross over whole.
        return bool(devices) and bool(landed) and not (devices & landed)


def host_syncs(work: Callable[[], object]) -> list[str]:
    """Names of the operators that make `work` wait, in order. Runs it."""
    mode = HostSyncs()
    with mode:
        work()
    return mode.found
