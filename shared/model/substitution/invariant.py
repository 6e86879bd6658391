"""Products and norms of a model on a GPU that give a token the same bits in any company: neap's, in place of those of
the vendor, which choose by the number of tokens how they sum.

For GPUs only: on a CPU `shared.model.substitution.apply` replaces more. A module is replaced if both compute the same
on random input.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shared import ops
from shared.model.substitution.experts import one_expert_at_a_time, routed
from shared.model.substitution.experts_on_gpu import GroupedExperts, NoProducts, group, make_router, ungroup
from shared.model.substitution.layer import Hooks
from shared.model.substitution.linear import norm
from shared.model.substitution.match import Unsuitable, random_input, relative_error
from shared.model.substitution.merged_linear import MergedLinear
from shared.model.weights.lazy import as_parameter
from shared.model.weights.on_device import BlocksLinear
from shared.model.weights.quantised import quantisation
from shared.ops.paged_on_gpu import has_triton
from shared.ops.products import invariant_linear

# Largest relative difference of numbers that are rounded to a dtype, in units of its precision.
UNITS = 4
NUM_ROWS = 3

Forward = Callable[[Tensor], Tensor]
Seen = dict[object, str]


@dataclass(frozen=True)
class InvariantReport:
    """Modules that were replaced, and why others were not, by their names: a token's bits may depend on its company
    there."""

    linears: int
    norms: int
    left_alone: Mapping[str, str]
    experts: int = 0


class InvariantLinear(nn.Linear):
    """x [..., K] -> [..., N]."""

    def forward(self, input: Tensor) -> Tensor:
        return invariant_linear(input, self.weight, self.bias)


class InvariantConv1D(nn.Module):
    """As `InvariantLinear`, in place of GPT-2's layer, whose weight [K, N] was turned."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return invariant_linear(x, self.weight, self.bias)


class InvariantNorm(nn.Module):
    """x [..., D] -> [..., D]: an RMS norm, or with a bias a layer norm."""

    weight: Tensor
    norm_bias: Tensor | None
    form: tuple[float, float]  # eps, and what is added to the weight

    def forward(self, x: Tensor) -> Tensor:
        eps, offset = self.form
        if self.norm_bias is None:
            return ops.rms_norm(x, self.weight, eps, offset)
        return ops.layer_norm(x, self.weight, self.norm_bias, eps)


@torch.no_grad()
def make_invariant(model: PreTrainedModel) -> InvariantReport:
    """Replaces what can be replaced, in place. The model must stay on its device."""
    left_alone: dict[str, str] = {}
    counts = {"linear": 0, "norm": 0, "experts": 0}
    if quantisation(model.config) is not None:
        return InvariantReport(0, 0, {"its products": "are those of the package that quantised the model"})
    if model.device.type == "cuda" and not has_triton():
        return InvariantReport(0, 0, {"its products": "are the vendor's, because the package triton is not installed"})
    seen: dict[object, str] = {}
    with one_expert_at_a_time(model):
        _replace_all(model, counts, left_alone, seen)
    return InvariantReport(counts["linear"], counts["norm"], left_alone, counts["experts"])


def _replace_all(model: nn.Module, counts: dict[str, int], left_alone: dict[str, str], seen: Seen) -> None:
    for name, module in model.named_modules():
        dimensions = [parameter.dim() for parameter in module.parameters(recurse=False)]
        is_linear = type(module) in (nn.Linear, Conv1D) or isinstance(module, MergedLinear)
        is_norm = bool(dimensions) and max(dimensions) == 1 and not list(module.children())
        if isinstance(module, BlocksLinear):
            counts["linear"] += 1
            continue
        if not dimensions or isinstance(module, nn.Embedding) or not (is_linear or is_norm or max(dimensions) > 1):
            continue
        if is_linear and "forward" not in vars(module) and not Hooks([module]).are_any():
            kind, replace = "linear", _replace_linear
        elif is_norm:
            kind, replace = "norm", _replace_norm
        elif max(dimensions) == 3:
            kind, replace = "experts", _replace_experts
        elif dimensions in ([2], [2, 1]) and not is_linear and not Hooks([module]).are_any():
            kind, replace = "linear", _replace_router
        else:
            left_alone[name] = "is computed by the model's own code"
            continue
        try:
            replace(module, seen)
        except Unsuitable as reason:
            left_alone[name] = str(reason)
        else:
            counts[kind] += 1


def _replace_linear(module: nn.Module, seen: Seen) -> None:
    """`seen`: of each form of module that was compared, what was found: empty if it agrees."""
    assert isinstance(module, nn.Linear | Conv1D)
    weight: Tensor = module.weight.T.contiguous() if isinstance(module, Conv1D) else module.weight
    if weight.numel() == 0 or not weight.is_contiguous():
        raise Unsuitable("its weight is empty or not contiguous")
    form = type(module), weight.shape, module.bias is None, weight.dtype
    own, theirs = (partial(multiply, weight=weight, bias=module.bias) for multiply in (invariant_linear, F.linear))
    _compare(own, module.forward if isinstance(module, Conv1D) else theirs, weight, weight.shape[1], form, seen)
    if isinstance(module, MergedLinear):
        module.group.multiply = invariant_linear
    elif isinstance(module, Conv1D):
        module.weight = as_parameter(weight)
        module.__class__ = InvariantConv1D  # type: ignore[assignment]
    else:
        module.__class__ = InvariantLinear


def _replace_norm(module: nn.Module, seen: Seen) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise Unsuitable("has no weight")
    # What it computes is found out in float32, by the CPU's kernels.
    found = norm(deepcopy(module).to("cpu", torch.float32)).form
    assert isinstance(found, tuple)
    eps, offset, is_centred = found
    bias = getattr(module, "bias", None)
    if is_centred and bias is None:
        bias = torch.zeros_like(weight)
    stand_in = InvariantNorm()
    stand_in.weight = weight
    for each in (stand_in, module):
        object.__setattr__(each, "norm_bias", bias if is_centred else None)  # which may be no parameter
        each.form = eps, offset  # type: ignore[assignment]
    _compare(
        stand_in.forward,
        module.forward,
        weight,
        weight.shape[0],
        (type(module), found, weight.shape, weight.dtype),
        seen,
    )
    module.__class__ = InvariantNorm


def _replace_experts(module: nn.Module, seen: Seen) -> None:
    if not isinstance(module, GroupedExperts):
        group(module, {})
    assert isinstance(module, GroupedExperts)
    parameter = module.get_parameter(module.matrices[0][0])
    form = module.own_class, module.matrices, parameter.shape, parameter.dtype
    width = parameter.shape[1 if module.is_transposed else 2]
    index = (torch.arange(2 * NUM_ROWS, device=parameter.device) % len(parameter)).view(NUM_ROWS, 2)
    weights = random_input(NUM_ROWS, 2).abs().to(parameter.device, parameter.dtype)
    own, theirs = (partial(each.forward, module) for each in (GroupedExperts, module.own_class))
    try:
        _compare(lambda x: own(x, index, weights), lambda x: theirs(x, index, weights), parameter, width, form, seen)
    except Unsuitable:
        ungroup(module)
        raise


def _replace_router(module: nn.Module, seen: Seen) -> None:
    """What follows from its logits is the module's own, or what `make_router` finds out."""
    weight = module.get_parameter("weight")
    x = random_input(NUM_ROWS, weight.shape[1]).to(weight.device, weight.dtype)
    made, before = routed(module, x), type(module)
    make_router(module, made, InvariantLinear)
    try:
        with NoProducts():
            _compare(lambda x: module(x)[0], lambda _: made[0], weight, weight.shape[1], (before, weight.shape), seen)
    except Unsuitable:
        module.__class__ = before
        raise


def _compare(own: Forward, theirs: Forward, weight: Tensor, width: int, form: object, seen: Seen) -> None:
    """Raises `Unsuitable` if they do not agree on rows of this width. Modules of one form are compared once."""
    if form not in seen:
        x = random_input(NUM_ROWS, width).to(weight.device, weight.dtype)
        error = relative_error(own(x).float(), theirs(x).float())
        tolerance = max(UNITS * torch.finfo(weight.dtype).eps, 1e-5)
        seen[form] = "" if error <= tolerance else f"is computed otherwise by neap's kernel, by {error:.1e} (relative)"
    if seen[form]:
        raise Unsuitable(seen[form])
