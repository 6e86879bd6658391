"""Experts that are stored as one parameter of several matrices, multiplied one by one from packed weights.

A module that follows transformers' interface of experts takes tokens [T, D], the experts of each token [T, k] and their
shares [T, k]. The replacement multiplies the tokens of each expert together and adds up each token's experts in the
order of its choices, so its bits do not depend on the other tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared import ops
from shared.model.substitution.linear import pack_matrix
from shared.model.substitution.match import Experts, Substitute, Unsuitable, agrees, of_all_sizes, random_input
from shared.model.substitution.row_invariant import row_invariant
from shared.model.weights.lazy import lazy
from shared.model.weights.stored import Packed, Stacked, Stored

# What transformers' decorator sets on every class of experts, and the values that the replacement serves.
_CONTRACT = {"has_post_expert_norm": False, "_is_expert_parallel": False}
_TOKENS, _CHOICES = 5, 2


@dataclass(frozen=True)
class _Matrices:
    """The matrices [N, K] of all experts. `biases`: the name of the module's parameter [E, N]; it may have none."""

    packed: tuple[Tensor, ...]
    rows: int
    module: nn.Module
    biases: str

    def __call__(self, x: Tensor, expert: int) -> Tensor:
        # Read from the module each time: a bias that is still in its file is read into memory later.
        biases = getattr(self.module, self.biases, None)
        bias = None if biases is None else biases[expert]
        return ops.packed_linear(x, self.packed[expert], self.rows, bias)


def experts(module: nn.Module, *, form: object | None = None) -> Substitute:
    """A module of transformers' interface of experts, whatever its activation, gate, biases and layout."""
    settings: Any = module
    if any(getattr(module, name, None) is not value for name, value in _CONTRACT.items()):
        raise Unsuitable("stores several matrices in one parameter, not by transformers' interface")
    names = ("gate_up_proj" if settings.has_gate else "up_proj", "down_proj")
    if {name for name, p in module.named_parameters() if p.dim() > 2} != set(names):
        raise Unsuitable("stores other matrices than those of transformers' interface of experts")
    stored = tuple(_pack(module.get_parameter(name), settings.is_transposed) for name in names)
    into, out_of = (
        _Matrices(stack.memory, stack.rows, module, f"{name}_bias") for name, stack in zip(names, stored, strict=True)
    )
    act = row_invariant(settings._apply_gate if settings.has_gate else settings.act_fn)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_tokens, num_choices = top_k_index.shape
        chosen = top_k_index.flatten()
        # Stable, so that the tokens of an expert stay in order. Numbers beyond the last expert stand for none.
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=len(into.packed)).tolist()[: len(into.packed)]
        outputs = hidden_states.new_zeros(len(chosen), hidden_states.shape[-1])
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                places = order[begin : begin + count]
                inner = act(into(hidden_states[places // num_choices], expert))
                outputs[places] = out_of(inner, expert)
                begin += count
        shares = outputs.view(num_tokens, num_choices, -1) * top_k_weights[..., None]
        total = shares[:, 0]
        for choice in range(1, num_choices):
            total = total + shares[:, choice]
        return total.to(hidden_states.dtype)

    if form is None:
        _compare(forward, module, len(into.packed), stored[0].columns)
    sources = tuple((module, name) for name in names)
    return Substitute(forward, Experts(), "experts", sources, stored)


def _pack(parameter: Tensor, transposed: bool) -> Stacked:
    if parameter.dim() != 3 or parameter.dtype != torch.float32 or parameter.device.type != "cpu":
        raise Unsuitable(f"its experts are {parameter.dtype} on {parameter.device}")
    stored = lazy(parameter)
    if isinstance(stored, Stacked) and stored.transposed == transposed:
        matrices: list[Stored] = [
            Packed(part.pack(), part.rows, part.columns, part.format, transposed=transposed) for part in stored.parts
        ]
    else:
        plain = parameter.detach() if stored is None else stored.dequantised()
        matrices = [pack_matrix(matrix, transposed=transposed) for matrix in plain]
    return Stacked(matrices)


def _compare(forward: Any, module: nn.Module, num_experts: int, width: int) -> None:
    """Raises `Unsuitable` if `forward` differs on ordinary, small or large tokens."""
    inputs = of_all_sizes(random_input(_TOKENS, width))
    count = _TOKENS * len(inputs)
    chosen = (num_experts - 1 - torch.arange(count * _CHOICES)) % num_experts
    index, weights = chosen.view(count, _CHOICES), random_input(count, _CHOICES).abs()
    if not agrees(lambda x: forward(x, index, weights), lambda x: module(x, index, weights), *inputs):
        raise Unsuitable("does more than its experts' products, by transformers' interface")
