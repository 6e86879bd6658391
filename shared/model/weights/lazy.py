"""A parameter of a model that stands for a matrix in a file or packed for the kernels.

To the model it is a float32 tensor on the CPU, or one of the model's dtype on a GPU. An operation that needs its
numbers dequantises the matrix for this operation alone, so the model's own code runs with one dequantised matrix at a
time. A look-up of rows, as in an embedding, reads only these. A matmul as in a linear layer dequantises some rows at a
time.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shared.model.weights.composed import Joined, Stacked
from shared.model.weights.stored import Reader, Stored

_POOL: ContextVar[ThreadPoolExecutor | None] = ContextVar("neap_parts", default=None)
_ALIASES = frozenset([torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default])


class LazyWeight(Tensor):
    """A read-only tensor [*stored.shape] of the stored matrix' dtype."""

    stored: Stored
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, stored: Stored) -> "LazyWeight":
        weight: LazyWeight = Tensor._make_wrapper_subclass(
            cls, stored.shape, dtype=stored.dtype, device=stored.device, requires_grad=False
        )
        weight.stored = stored
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # upstream leaves its arguments without types
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyWeight):
            if func in _ALIASES or (func is torch.ops.aten._to_copy.default and _is_noop(first, kwargs)):
                return LazyWeight(first.stored)
            if func is torch.ops.aten.t.default:
                return LazyWeight(first.stored.turned())
            if func is torch.ops.aten.select.int and isinstance(first.stored, Stacked) and args[1] == 0:
                return LazyWeight(first.stored.parts[args[2]])
            if func is torch.ops.aten.embedding.default and not first.stored.transposed:
                return first.stored.look_up(args[1])
            if func is torch.ops.aten.select.int and args[1] == 0 and not first.stored.transposed:
                with torch.inference_mode(False):  # what comes of a tensor that is none of it may not be one
                    return first.stored.look_up(torch.tensor(args[2] % first.stored.rows))
        if func in _ASSEMBLIES and (assembled := _ASSEMBLIES[func](*args, **kwargs)) is not None:
            return LazyWeight(assembled)
        if func in _MATMULS and not kwargs and (out := _MATMULS[func](*args)) is not None:
            return out
        if func._schema.is_mutable and any(_changes(func, args, kwargs)):
            raise RuntimeError(f"{func} would change weights that are read-only")
        return func(*tree_map(_dequantised, args), **tree_map(_dequantised, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> "LazyWeight":
        copied = LazyWeight(self.stored)
        if isinstance(self, nn.Parameter):
            copied = as_parameter(copied)  # type: ignore[assignment]
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyWeight({list(self.shape)}, {self.stored.format})"


def _stacked(matrices: Sequence[Tensor], dim: int = 0) -> Stored | None:
    """Matrices of one shape as one parameter of several, as transformers assembles experts.
    None if they are not that."""
    parts = [matrix.stored for matrix in matrices if isinstance(matrix, LazyWeight)]
    alike = {(p.shape, p.format, p.transposed) for p in parts}
    if dim or len(parts) < len(matrices) or len(alike) > 1 or len(parts[0].shape) > 2:
        return None
    return Stacked(parts)


def _side_by_side(stacks: Sequence[Tensor], dim: int = 0) -> Stored | None:
    """The matrices of several such parameters one below the other, as gate and up."""
    parts = [s.stored for s in stacks if isinstance(s, LazyWeight) and type(s.stored) is Stacked]
    fits = dim == 1 and len(parts) == len(stacks) and not any(part.transposed for part in parts)
    if not fits or len({(len(part.parts), part.columns) for part in parts}) > 1:
        return None
    return Stacked([Joined(each) for each in zip(*(part.parts for part in parts), strict=True)])


_ASSEMBLIES: dict[Any, Any] = {torch.ops.aten.stack.default: _stacked, torch.ops.aten.cat.default: _side_by_side}


def _by_parts(x: Tensor, turned: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x [..., K] @ the transpose [K, N] of a lazy matrix + bias [N] -> [..., N]. None if the operands are others."""
    stored = lazy(turned)
    if stored is None or not stored.transposed or isinstance(x, LazyWeight) or turned.dim() != 2:
        return None
    rows = x.reshape(-1, x.shape[-1])
    with torch.inference_mode(False):  # so that other threads may write to it
        # One tensor for all products: those that stay between parts keep the C library from using memory again, many of
        # them where this thread is late to take them.
        all_rows = rows.new_empty(stored.rows, len(rows))

    def multiply(first: int, part: Tensor) -> None:
        # The matrix as the left operand: else threads share the sums of a short product, and wait for each other.
        torch.mm(part, rows.T, out=all_rows[first : first + len(part)])

    def read_and_multiply(reader: Reader) -> None:
        with torch.no_grad():
            multiply(reader[0], reader[1]())

    if (pool := _POOL.get()) is not None:
        deque(pool.map(read_and_multiply, stored.row_readers()), maxlen=0)
    else:
        first = 0
        for part in stored.row_parts():
            multiply(first, part)
            first += len(part)
    out = all_rows.T.reshape(*x.shape[:-1], stored.rows).contiguous()
    return out if bias is None else out + bias


@contextmanager
def parts_side_by_side() -> Iterator[None]:
    """Within it, each part of a matrix is dequantised and multiplied by one thread, so that threads do not wait for
    each other at every part. What torch computes beside that is computed by one thread.
    """
    count = torch.get_num_threads()
    with ThreadPoolExecutor(count, "neap-parts") as pool:
        before = _POOL.set(pool)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(count)
            _POOL.reset(before)


_MATMULS: dict[Any, Any] = {
    torch.ops.aten.mm.default: _by_parts,
    torch.ops.aten.addmm.default: lambda bias, x, turned: _by_parts(x, turned, bias),
    # Under inference mode this one is not taken apart.
    torch.ops.aten.linear.default: lambda x, weight, bias=None: _by_parts(x, weight.t(), bias),
}


def lazy(parameter: object) -> Stored | None:
    """The matrix that `parameter` stands for. None if it is an ordinary tensor."""
    return parameter.stored if isinstance(parameter, LazyWeight) else None


def as_parameter(weight: Tensor) -> nn.Parameter:
    """`weight` as a parameter without a gradient."""
    return nn.Parameter(weight, requires_grad=False)


@torch.no_grad()
def realise(model: nn.Module) -> None:
    """Reads all lazy weights of a model into memory as float32. Parameters that were shared stay shared."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            stored = lazy(parameter)
            if stored is None or parameter is None:
                continue
            if id(parameter) not in parameters:
                parameters[id(parameter)] = nn.Parameter(stored.dequantised(), requires_grad=parameter.requires_grad)
            setattr(module, name, parameters[id(parameter)])


def _dequantised(value: Any) -> Any:
    return value.stored.dequantised() if isinstance(value, LazyWeight) else value


def _is_noop(weight: Tensor, kwargs: Mapping[str, Any]) -> bool:
    is_there = str(kwargs.get("device")) in ("None", weight.device.type, str(weight.device))
    return kwargs.get("dtype") in (None, weight.dtype) and is_there


def _changes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[bool]:
    """Per written argument, whether it contains a lazy weight."""
    values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    written = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [any(isinstance(leaf, LazyWeight) for leaf in tree_leaves(values.get(name))) for name in written]
