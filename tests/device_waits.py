"""Finding what would make a host wait for its device, without one: on tensors that hold no numbers, or on a CPU's as if
it were far."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_READING = {
    "tolist", "item", "numpy", "cpu", "nonzero", "unique", "equal", "masked_select", "is_nonzero",
    "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "__repr__",
}  # fmt: skip


class Reads(TorchFunctionMode):
    """`found` names what reads a tensor's numbers, on any device, in order: each would be a wait if that were a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        by_mask = name == "__getitem__" and any(
            isinstance(part, Tensor) and part.dtype == torch.bool for part in tree_leaves(args[1:])
        )
        if name in _READING or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Crossings(TorchDispatchMode):
    """Copies between devices: `awaited` from one to the host, or to one without non_blocking; `others` those the host
    goes on after.

    For tensors on "meta", whose numbers cannot be read anyway.
    """

    def __init__(self) -> None:
        super().__init__()
        self.awaited: list[str] = []
        self.others: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {value.device.type for value in tree_leaves(args) if isinstance(value, Tensor)}
        after = {value.device.type for value in tree_leaves(out) if isinstance(value, Tensor)}
        if func is aten._to_copy.default and before != after:
            goes_on = after != {"cpu"} and (kwargs or {}).get("non_blocking", False)
            (self.others if goes_on else self.awaited).append(f"{before} -> {after}")
        elif func is aten.copy_.default and len(before) > 1:
            self.awaited.append(f"{before} mixed")
        return out
