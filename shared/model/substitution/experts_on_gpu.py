"""Experts and their routers on a GPU: the choices of a pass are sorted by expert there, and one launch of our product
multiplies all of them, by matrices as they are or in blocks, and by gate and up apart where their blocks differ in
kind. No number goes to the host, and no bit depends on company."""

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
    is_transposed: bool
    act_fn: nn.Module
    _apply_gate: Callable[[Tensor], Tensor]
    # Of each matrix its name, and of its sections, one below the other, the rows and the kind of blocks, empty if it is
    # plain; choices of a tile at most.
    matrices: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
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

    def _multiply(
        self, name: str, sections: tuple[tuple[int, str], ...], x: Tensor, index: Tensor, grouping: Grouping
    ) -> Tensor:
        biases, first, made = getattr(self, f"{name}_bias", None), 0, []
        for number, (rows, kind) in enumerate(sections):
            if kind:
                held = [getattr(self, f"{name}_{number}_{part}") for part in Blocks._fields]
            else:
                held = [_upright(self, getattr(self, name))]
            bias = None if biases is None else biases[:, first : first + rows].contiguous()
            made.append(expert_linear(x, held, index, grouping, rows, kind, bias))
            first += rows
        return made[0] if len(made) == 1 else torch.cat(made, -1)


def _upright(module: nn.Module, weight: Tensor) -> Tensor:
    """Matrices [E, N, K], which some modules hold turned."""
    return weight.transpose(1, 2) if module.is_transposed else weight


def groupable(module: nn.Module) -> tuple[str, str]:
    """The names of its matrices. Raises `Unsuitable`."""
    names = matrix_names(module)
    biases = {f"{name}_bias" for name in names}
    if {name for name, _ in module.named_parameters()} not in ({*names}, {*names} | biases):
        raise Unsuitable("its experts have other parameters than matrices and biases")
    return names


def group(module: nn.Module, blocks: Mapping[str, Sequence[tuple[Blocks, str]]]) -> None:
    """Makes it `GroupedExperts`, in place. `blocks`: of its matrices, by name, the sections, one below the other, and
    of which kind each is. Raises `Unsuitable`."""
    settings: Any = module
    names = groupable(module)
    matrices, widest = [], MOST_TOKENS
    for name in names:
        parameter, held = module.get_parameter(name), blocks.get(name, ())
        settings.num_matrices, *sizes = parameter.shape
        rows, width = reversed(sizes) if settings.is_transposed else sizes
        if not held and not _upright(module, parameter).is_contiguous():
            # It keeps its shape, and lies as the product reads it.
            turned = _upright(module, parameter.detach()).contiguous()
            module._parameters[name] = as_parameter(_upright(module, turned))
        capability = capability_of(parameter.device) if parameter.is_cuda else _CAPABILITY
        sections = tuple((part.rows // settings.num_matrices, kind) for part, kind in held) or ((rows, ""),)
        for own_rows, kind in sections:
            tiles = ProductTiles(own_rows, width, LAYOUTS.get(kind), parameter.dtype, capability)
            widest = min(widest, tiles.tile_tokens(MOST_TOKENS))
        matrices.append((name, sections))
        for number, (section, _) in enumerate(held):
            for part, tensor in section._asdict().items():
                module.register_buffer(f"{name}_{number}_{part}", tensor, persistent=False)
    settings.matrices, settings.most_choices, settings.own_class = tuple(matrices), widest, type(module)
    module.__class__ = _with(GroupedExperts, type(module))


def ungroup(module: GroupedExperts) -> None:
    """Makes it what it was, with matrices in 16 bits."""
    for name, sections in module.matrices:
        for number, (_, kind) in enumerate(sections):
            for part in Blocks._fields if kind else ():
                delattr(module, f"{name}_{number}_{part}")
        stored = lazy(module._parameters[name])
        if stored is not None:
            module._parameters[name] = as_parameter(stored.dequantised())
    module.__class__ = module.own_class  # type: ignore[assignment]


def _subclass(*bases: Any) -> Any:
    return type(f"Invariant{bases[-1].__name__}", bases, {})


_with: Any = cache(_subclass)


class InvariantRouter(nn.Module):
    """Tokens [..., D] -> logits [T, E], shares and numbers, of a matrix [E, D] and perhaps a bias [E]. `choice`: how
    many are chosen, and whether shares are normed."""

    weight: Tensor
    choice: tuple[int, bool]
    dtype: torch.dtype

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, self.weight.shape[1])
        logits = invariant_linear(x, self.weight, getattr(self, "bias", None))
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
