"""Makes torch's own functions inside modules give a token the same bits whatever else is in the pass.

Torch computes the last numbers of a tensor, and of each thread's part of it, by other instructions than the rest. So
silu, sigmoid, gelu and softplus round some numbers differently in a longer pass. Matmuls round differently for every
number of rows. The modules that call these functions themselves, such as activations and the routers of experts, are
found by watching one pass. Their forward then runs under `RowInvariant`, which evaluates the calls so that rows do not
matter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shared import ops
from shared.model.weights.lazy import lazy

# Numbers per evaluation, of which torch makes whole vectors only, and at most so many that it uses one thread.
_VECTORS, _PIECE = 64, 1 << 14

_ELEMENTWISE: frozenset[Any] = frozenset(
    [F.silu, torch.sigmoid, Tensor.sigmoid, F.gelu, F.softplus, F.mish, F.elu, F.selu, F.celu]
)
_Function = Callable[..., Any]


class RowInvariant(TorchFunctionMode):
    """Under this mode the bits of a row's result do not depend on the other rows, for the functions in this file."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENTWISE:
            return _elementwise(func, *args, **kwargs)
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _elementwise(func: _Function, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    flat = x.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % _VECTORS))
    parts = [func(part, *args, **kwargs) for part in padded.split(_PIECE)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[: len(flat)].view(x.shape)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    stored = lazy(weight)
    if stored is None or len(stored.memory) != 1 or stored.transposed:
        return F.linear(x, weight, bias)
    return ops.packed_linear(x, stored.memory[0], stored.rows, bias)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    supported = (
        q.dim() == 4
        and q.dtype == torch.float32
        and q.device.type == "cpu"
        and dropout_p == 0
        and (attn_mask is None or (attn_mask.dtype == torch.bool and attn_mask.shape[1] == 1))
        and (not is_causal or q.shape[2] == k.shape[2])
    )
    if not supported:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        attn_mask = attn_mask.expand(-1, -1, q.shape[2], k.shape[2])
    out = ops.contiguous_attention(q, k, v, k.shape[2], attn_mask, is_causal, scale)
    return out.transpose(1, 2)


# The modules that call the functions above themselves, and which of their parameters they multiply by.
Callers = dict[nn.Module, set[str]]


class _Watch(TorchFunctionMode):
    def __init__(self, callers: Callers, running: Sequence[nn.Module]) -> None:
        super().__init__()
        self._callers, self._running = callers, running

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._running and func in (*_ELEMENTWISE, F.linear, F.scaled_dot_product_attention):
            module = self._running[-1]
            used = self._callers.setdefault(module, set())
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            used |= {name for name, p in module._parameters.items() if p is not None and p is weight}
        return func(*args, **kwargs)


@contextmanager
def watched(model: nn.Module) -> Iterator[Callers]:
    """Notes what the passes within it call."""
    callers: Callers = {}
    running: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        running.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in model.modules()]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in model.modules()]
    try:
        with _Watch(callers, running):
            yield callers
    finally:
        for hook in hooks:
            hook.remove()


def row_invariant(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` under `RowInvariant`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with RowInvariant():
            return forward(*args, **kwargs)

    return run
