"""Replacements of linear layers, RMS norms and gated MLPs by ops over packed weights.

Each function takes a module and returns its `Substitute`, or raises `Unsuitable` with the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared import ops
from shared.model.substitution.match import (
    GatedMlp,
    PackedLinear,
    RmsNorm,
    Substitute,
    Unsuitable,
    agrees,
    random_input,
)

INPUT_ROWS = 3


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None


def _packable(weight: Any) -> Tensor:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.numel() == 0:
        raise Unsuitable("has no two-dimensional weight")
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise Unsuitable(f"weight is {weight.dtype} on {weight.device}")
    return weight.detach()


def linear(module: nn.Module, *, transposed: bool = False) -> Substitute:
    """A module that computes x @ weight.T + bias. `transposed`: whether the weight is stored as [K, N], as in GPT-2's Conv1D."""
    stored = _packable(module.weight)
    weight = stored.T if transposed else stored
    out_features, bias = weight.shape[0], _bias(module)
    packed = ops.pack_linear(weight)

    def forward(x: Tensor) -> Tensor:
        return ops.packed_linear(x, packed, out_features, bias)

    if not agrees(forward, module, random_input(INPUT_ROWS, weight.shape[1])):
        raise Unsuitable("does more than x @ weight.T + bias")

    def unpack() -> list[Tensor]:
        restored = ops.unpack_linear(packed)
        return [restored.T.contiguous() if transposed else restored]

    return Substitute(
        forward, PackedLinear(packed, out_features, bias), (packed,), (module,), unpack
    )


def rms_norm(module: nn.Module) -> Substitute:
    """A module that computes x / sqrt(mean(x^2) + eps) * (weight + offset), with offset 0 or 1. eps is one of the module's attributes."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or weight.dim() != 1 or weight.dtype != torch.float32:
        raise Unsuitable("has other parameters than one float32 vector")
    frozen = weight.detach()
    x = random_input(INPUT_ROWS, 2, frozen.shape[0])
    # Small input reveals eps. Shifted input reveals whether the mean is subtracted.
    inputs = (x, x * 1e-3, x + 1)
    epsilons = {v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1}
    for eps in sorted(epsilons):
        for offset in (0.0, 1.0):
            forward = partial(ops.rms_norm, weight=frozen, eps=eps, weight_offset=offset)
            if agrees(forward, module, *inputs):
                return Substitute(forward, RmsNorm(frozen, eps, offset))
    raise Unsuitable("is not an RMS norm")


@dataclass(frozen=True)
class _Gate:
    layers: tuple[nn.Linear, ...]  # gate, up, down; or gate and up in one, down
    gate: Tensor
    up: Tensor
    down: Tensor
    bias: Tensor | None  # of gate, then up
    down_bias: Tensor | None
    activation: str

    def plain(self, x: Tensor) -> Tensor:
        gate_bias, up_bias = (None, None) if self.bias is None else self.bias.chunk(2)
        gate, up = F.linear(x, self.gate, gate_bias), F.linear(x, self.up, up_bias)
        acted = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return F.linear(acted * up, self.down, self.down_bias)


def _joined_bias(gate: nn.Linear, up: nn.Linear) -> Tensor | None:
    if gate.bias is None and up.bias is None:
        return None
    parts: list[Tensor] = [
        m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in (gate, up)
    ]
    return torch.cat(parts).detach()


def _gates(linears: list[nn.Linear]) -> Iterator[_Gate]:
    """All ways of assigning the linear layers to gate, up and down, with both activations."""
    for activation in ("silu", "gelu_tanh"):
        for order in permutations(linears):
            down = order[-1]
            if len(order) == 3:
                gate, up = order[0].weight.detach(), order[1].weight.detach()
                bias = _joined_bias(order[0], order[1])
            else:  # gate and up stored as one layer
                gate, up = (half.detach() for half in order[0].weight.tensor_split(2))
                bias = None if order[0].bias is None else order[0].bias.detach()
            if gate.shape == up.shape == down.weight.shape[::-1]:
                yield _Gate(order, gate, up, down.weight.detach(), bias, _bias(down), activation)


def gated_mlp(module: nn.Module) -> Substitute:
    """A module that computes down(activation(gate(x)) * up(x)). Gate and up may be two layers or one."""
    children = list(module.children())
    linears = [child for child in children if type(child) is nn.Linear]
    if len(linears) not in (2, 3) or list(module.parameters(recurse=False)):
        raise Unsuitable("does not have the layers of a gated MLP")
    if any(child._forward_hooks or child._forward_pre_hooks for child in linears):
        raise Unsuitable("has hooks on its layers, which a fused kernel would not call")
    for layer in linears:
        _packable(layer.weight)
    x = random_input(INPUT_ROWS, linears[0].in_features)
    found = next((g for g in _gates(linears) if agrees(g.plain, module, x)), None)
    if found is None:
        raise Unsuitable("is not down(activation(gate(x)) * up(x))")
    width, hidden = found.down.shape[1], found.down.shape[0]
    gate, up, down = (ops.pack_linear(weight) for weight in (found.gate, found.up, found.down))
    bias, down_bias, activation, layers = (
        found.bias,
        found.down_bias,
        found.activation,
        found.layers,
    )

    def forward(x: Tensor) -> Tensor:
        acted = ops.packed_gated_linear(x, gate, up, width, activation, bias)
        return ops.packed_linear(acted, down, hidden, down_bias)

    def unpack() -> list[Tensor]:
        halves = [ops.unpack_linear(gate), ops.unpack_linear(up)]
        first = halves if len(layers) == 3 else [torch.cat(halves)]
        return [*first, ops.unpack_linear(down)]

    if not agrees(forward, module, x):
        raise Unsuitable("its fused form differs by more than the tolerance")
    recipe = GatedMlp(gate, up, width, activation, bias, PackedLinear(down, hidden, down_bias))
    return Substitute(forward, recipe, (gate, up, down), layers, unpack)
