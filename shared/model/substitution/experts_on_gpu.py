"""Experts and their routers on a GPU: the choices of a pass are sorted by expert there, and one launch of our product
multiplies all of them, by matrices as they are or in blocks. No number goes to the host, and no bit depends on
company."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shared.model.substitution.experts import added, matrix_names
from shared.model.substitution.match import Unsuitable
from shared.model.weights.lazy import as_parameter, lazy
from shared.ops.blocks import LAYOUTS, Blocks
from shared.ops.paged_on_gpu import capability_of
from shared.ops.product_tiles import LEAST_TOKENS, MOST_TOKENS, ProductTiles
from shared.ops.products import Grouping, expert_linear, grouped, invariant_linear, largest_shares

# A device that only tests have.
_CAPABILITY = 90


class GroupedExperts(nn.Module):
    """Before a class of transformers' interface of experts in the order of bases. Matrices in blocks are buffers, as
    those of `BlocksLinear`."""

    has_gate: bool
    act_fn: nn.Module
    _apply_gate: Callable[[Tensor], Tensor]
    # Of each matrix its name, its rows and the kind of its blocks, empty if it is plain; choices of a tile at most.
    matrices: tuple[tuple[str, int, str], tuple[str, int, str]]
    most_choices: int
    own_class: type[nn.Module]
    num_matrices: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        each = -(-top_k_index.numel() // self.num_matrices)
        size = min(max(LEAST_TOKENS, 1 << (each - 1).bit_length()), self.most_choices)
        grouping = grouped(top_k_index, self.num_matrices, size)
        into, out_of = self.matrices
        inner = self._multiply(*into, hidden_states, top_k_index, grouping)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        outputs = self._multiply(*out_of, inner, top_k_index, grouping)
        return added(outputs, top_k_weights)

    def _multiply(self, name: str, rows: int, kind: str, x: Tensor, index: Tensor, grouping: Grouping) -> Tensor:
        names = [f"{name}_{part}" for part in Blocks._fields] if kind else [name]
        return expert_linear(x, [getattr(self, each) for each in names], index, grouping, rows, kind)


def groupable(module: nn.Module) -> tuple[str, str]:
    """The names of its matrices. Raises `Unsuitable`."""
    settings: Any = module
    names = matrix_names(module)
    if settings.is_transposed or {name for name, _ in module.named_parameters()} != set(names):
        raise Unsuitable("its experts have biases, or hold their matrices turned")
    return names


def group(module: nn.Module, blocks: Mapping[str, tuple[Blocks, str]]) -> None:
    """Makes it `GroupedExperts`, in place. `blocks`: of its matrices, by name, and of which kind. Raises
    `Unsuitable`."""
    settings: Any = module
    names = groupable(module)
    matrices, widest = [], MOST_TOKENS
    for name in names:
        kind, parameter = blocks[name][1] if name in blocks else "", module.get_parameter(name)
        settings.num_matrices, rows, width = parameter.shape
        if not kind and not parameter.is_contiguous():
            raise Unsuitable("its matrices are not contiguous")
        capability = capability_of(parameter.device) if parameter.is_cuda else _CAPABILITY
        tiles = ProductTiles(rows, width, LAYOUTS.get(kind), parameter.dtype, capability)
        widest = min(widest, tiles.tile_tokens(MOST_TOKENS))
        matrices.append((name, rows, kind))
        for part, tensor in blocks[name][0]._asdict().items() if kind else ():
            module.register_buffer(f"{name}_{part}", tensor, persistent=False)
    settings.matrices, settings.most_choices, settings.own_class = tuple(matrices), widest, type(module)
    module.__class__ = _with(GroupedExperts, type(module))


def ungroup(module: GroupedExperts) -> None:
    """Makes it what it was, with matrices in 16 bits."""
    for name, _, kind in module.matrices:
        for part in Blocks._fields if kind else ():
            delattr(module, f"{name}_{part}")
        stored = lazy(module._parameters[name])
        if stored is not None:
            module._parameters[name] = as_parameter(stored.dequantised())
    module.__class__ = module.own_class  # type: ignore[assignment]


def _subclass(*bases: Any) -> Any:
    return type(f"Invariant{bases[-1].__name__}", bases, {})


_with: Any = cache(_subclass)


class InvariantRouter(nn.Module):
    """Tokens [..., D] -> logits [T, E], shares and numbers, of a matrix [E, D]. `choice`: how many are chosen, and
    whether shares are normed."""

    weight: Tensor
    choice: tuple[int, bool]
    dtype: torch.dtype

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = invariant_linear(hidden_states.reshape(-1, self.weight.shape[1]), self.weight)
        shares, index = largest_shares(logits, *self.choice)
        return logits, shares.to(self.dtype), index


def make_router(module: nn.Module, made: tuple[Tensor, Tensor, Tensor], linear: type[nn.Linear]) -> None:
    """Makes a router that gave `made` multiply by `linear`, if it is a linear layer that goes on by itself, or by
    neap's product. Raises `Unsuitable` if it chooses otherwise than by the largest of its logits."""
    settings: Any = module
    if isinstance(module, nn.Linear):
        module.__class__ = _with(type(module), linear)
        return
    logits, shares, index = made
    for normed in (False, True):
        found, chosen = largest_shares(logits, index.shape[1], normed)
        if torch.equal(chosen, index) and torch.allclose(found.to(shares.dtype), shares, rtol=1e-2):
            settings.choice, settings.dtype = (index.shape[1], normed), shares.dtype
            module.__class__ = InvariantRouter
            return
    raise Unsuitable("does more than choose the largest of its products")


class NoProducts(TorchFunctionMode):
    """Within it torch's own products raise `Unsuitable`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (F.linear, torch.matmul, torch.mm, torch.einsum, Tensor.matmul, Tensor.mm, Tensor.__matmul__):
            raise Unsuitable("multiplies by itself")
        return func(*args, **(kwargs or {}))
