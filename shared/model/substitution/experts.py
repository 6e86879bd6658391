"""Experts that are stored as one parameter of several matrices, multiplied one by one from packed weights, and routers.

A module that follows transformers' interface of experts takes tokens [T, D], the experts of each token [T, k] and their
shares [T, k]. The replacement multiplies the tokens of each expert together and adds up each token's experts in the
order of its choices, so its bits do not depend on the other tokens. Gated MLPs are one op, others several.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from shared import ops
from shared.model.cache import refuse_if_out_of_memory
from shared.model.substitution.linear import INPUT_ROWS, own_matrix, pack_matrix
from shared.model.substitution.match import (
    ROUNDINGS,
    TOLERANCE,
    Experts,
    Router,
    Substitute,
    Unsuitable,
    agrees,
    of_all_sizes,
    random_input,
    relative_error,
)
from shared.model.substitution.row_invariant import row_invariant
from shared.model.weights.composed import TURNS, InTurn, Joined, Stacked
from shared.model.weights.lazy import lazy
from shared.model.weights.stored import ALL_ROWS, Packed, Stored
from shared.ops.experts import choose_experts, expert_table
from shared.ops.experts import experts as run_experts

# What transformers' decorator sets on every class of experts; and what later versions than 5.17 do, and the values that
# the replacement serves.
_INTERFACE = ("has_gate", "is_transposed", "_apply_gate")
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
        biases = getattr(self.module, self.biases, None)
        bias = None if biases is None else biases[expert]
        return ops.packed_linear(x, self.packed[expert], self.rows, bias)


@contextmanager
def one_expert_at_a_time(model: PreTrainedModel) -> Iterator[None]:
    """Within it, transformers' experts run the forward of their class, which multiplies by the matrices of one expert
    after another. By default they multiply by those of a layer at once, for which a `LazyWeight` dequantises all."""
    config: Any = model.config
    before = getattr(config, "_experts_implementation", None)
    if before is None:
        yield
        return
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def matrix_names(module: nn.Module) -> tuple[str, str]:
    """The parameters [E, N, K] of a module of transformers' interface of experts. Raises `Unsuitable`."""
    settings: Any = module
    differs = any(getattr(module, name, value) is not value for name, value in _CONTRACT.items())
    if differs or not all(hasattr(module, name) for name in _INTERFACE):
        raise Unsuitable("stores several matrices in one parameter, not by transformers' interface")
    names = ("gate_up_proj" if settings.has_gate else "up_proj", "down_proj")
    if {name for name, p in module.named_parameters() if p.dim() > 2} != set(names):
        raise Unsuitable("stores other matrices than those of transformers' interface of experts")
    return names


def experts(module: nn.Module, *, form: object | None = None) -> Substitute:
    """A module of transformers' interface of experts, whatever its activation, gate, biases and layout.
    `form`: the activation if they are gated MLPs, and whether the rows of gate and up follow each other in turn; or
    "experts"; if it is known."""
    settings: Any = module
    names = matrix_names(module)
    gate: Any = _gate(module, names) if form is None else None if form == "experts" else form
    forward: Callable[..., Tensor]
    into, out_of = (module.get_parameter(name) for name in names)
    turned = settings.is_transposed
    if gate:
        activation, in_turn = gate
        rows = TURNS if in_turn else _halves(into.shape[2 if turned else 1])
        stored = _pack(into, turned, rows), _pack(out_of, turned)
        pairs = zip(*(stack.parts for stack in stored), strict=True)
        matrices = [packed for gate_up, down in pairs for packed in (*gate_up.memory, *down.memory)]
        table = expert_table(matrices, *_biases(module, names, rows))
        recipe = Experts(table, stored[1].columns, activation)
        forward = partial(_run_table, table=table, activation=activation)
    else:
        stored = _pack(into, turned), _pack(out_of, turned)
        recipe, forward = Experts(), _one_by_one(module, names, stored)
    if form is None:
        _compare(forward, module, len(stored[0].parts), stored[0].columns)
    sources = tuple((module, name) for name in names)
    return Substitute(forward, recipe, gate or "experts", sources, stored)


def _run_table(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, table: Tensor, activation: str
) -> Tensor:
    return run_experts(hidden_states, top_k_index, top_k_weights, table, activation)


def _gate(module: nn.Module, names: Sequence[str]) -> tuple[str, bool] | None:
    """The activation of gated MLPs that the op of experts computes, and whether rows of gate and up follow each other
    in turn. None if they are others."""
    settings: Any = module
    parameters, biases = {name for name, _ in module.named_parameters()}, {f"{name}_bias" for name in names}
    if not settings.has_gate or parameters not in ({*names}, {*names} | biases):
        return None
    x = random_input(INPUT_ROWS, 64)
    for in_turn in (False, True):
        if settings.is_transposed and not in_turn:
            continue  # no family is so
        for name in ("silu", "gelu_tanh", "clamped_swish"):

            def gated(x: Tensor, name: str = name, in_turn: bool = in_turn) -> Tensor:
                gate, up = (x[..., ::2], x[..., 1::2]) if in_turn else x.chunk(2, -1)
                return ops.activate(gate, name) * (up.clamp(-7, 7) + 1 if name == "clamped_swish" else up)

            if agrees(gated, settings._apply_gate, *of_all_sizes(x)):
                return name, in_turn
    return None


def _halves(count: int) -> tuple[slice, slice]:
    return slice(0, count // 2), slice(count // 2, None)


def _biases(module: nn.Module, names: Sequence[str], rows: Sequence[slice]) -> tuple[Tensor | None, Tensor | None]:
    """float32 [E, N] as `expert_table` takes them, if there are any."""
    into, out_of = (getattr(module, f"{name}_bias", None) for name in names)
    if into is None or out_of is None:
        return None, None
    return torch.cat([into.detach()[:, own] for own in rows], 1).float(), out_of.detach().float().contiguous()


def added(outputs: Tensor, shares: Tensor) -> Tensor:
    """The sum [T, N] of each token's experts in float32, in the order of its choices, of what they made of it
    [T * k, N], by shares [T, k]."""
    parts = outputs.view(*shares.shape, -1).float() * shares[..., None].float()
    total = parts[:, 0]
    for choice in range(1, shares.shape[1]):
        total = total + parts[:, choice]
    return total.to(outputs.dtype)


def _one_by_one(module: nn.Module, names: Sequence[str], stored: Sequence[Stacked]) -> Callable[..., Tensor]:
    settings: Any = module
    into, out_of = (
        _Matrices(stack.memory, stack.rows, module, f"{name}_bias") for name, stack in zip(names, stored, strict=True)
    )
    act = row_invariant(settings._apply_gate if settings.has_gate else settings.act_fn)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_choices = top_k_index.shape[1]
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
        return added(outputs, top_k_weights)

    return forward


def _pack(parameter: Tensor, transposed: bool, rows: Sequence[slice] = (ALL_ROWS,)) -> Stacked:
    """`rows`: those of each matrix that are matrices of their own."""
    if parameter.dim() != 3 or parameter.dtype != torch.float32 or parameter.device.type != "cpu":
        raise Unsuitable(f"its experts are {parameter.dtype} on {parameter.device}")
    stored = lazy(parameter)
    if isinstance(stored, Stacked) and stored.transposed == transposed:
        matrices: list[Stored] = [_join(_pack_stored(part, rows, transposed), rows) for part in stored.parts]
    else:
        plain = parameter.detach() if stored is None else stored.dequantised()
        matrices = [_join([pack_matrix(each, transposed=transposed, rows=own) for own in rows], rows) for each in plain]
    return Stacked(matrices)


def _join(parts: Sequence[Stored], rows: Sequence[slice]) -> Stored:
    return parts[0] if len(parts) == 1 else InTurn(parts) if rows == TURNS else Joined(parts)


def _pack_stored(matrix: Stored, rows: Sequence[slice], transposed: bool) -> list[Stored]:
    kind = InTurn if rows == TURNS else Joined
    if isinstance(matrix, kind) and [part.rows for part in matrix.parts] == [matrix.rows // len(rows)] * len(rows):
        each: list[tuple[Stored, slice]] = [(part, ALL_ROWS) for part in matrix.parts]
    else:
        each = [(matrix, own) for own in rows]
    return [
        Packed(part.pack(own), len(range(*own.indices(part.rows))), part.columns, part.format, transposed=transposed)
        for part, own in each
    ]


def _compare(forward: Any, module: nn.Module, num_experts: int, width: int) -> None:
    """Raises `Unsuitable` if `forward` differs on ordinary, small or large tokens."""
    inputs = of_all_sizes(random_input(_TOKENS, width))
    count = _TOKENS * len(inputs)
    chosen = (num_experts - 1 - torch.arange(count * _CHOICES)) % num_experts
    # `agrees` compares the last tokens with the same ones, rounded, which says something of the same experts alone.
    rows = [*range(count), *[*range(count - _TOKENS, count)] * ROUNDINGS]
    index, weights = chosen.view(count, _CHOICES)[rows], random_input(count, _CHOICES).abs()[rows]
    both = (lambda x: forward(x, index, weights)), (lambda x: module.forward(x, index, weights))
    if not agrees(*both, *inputs, clamps=True):
        raise Unsuitable("does more than its experts' products, by transformers' interface")


def router(module: nn.Module, *, form: object | None = None) -> Substitute:
    """A module that chooses experts by a matrix [E, D] and a bias [E], if it has one: tokens [..., D] -> logits, shares
    and numbers, as `shared.ops.experts.choose_experts` gives them. `form`: how many it chooses and whether shares are
    normed."""
    weight = pack_matrix(own_matrix(module))
    packed, num_experts, width = weight.packed, weight.rows, weight.columns
    vectors = {name: vector.detach() for name, vector in module.named_parameters() if name != "weight"}
    own = vectors.pop("bias", None)
    if vectors or (own is not None and (own.shape != (num_experts,) or own.dtype != torch.float32)):
        raise Unsuitable("has other parameters than a matrix and a float32 bias of its rows")

    def substitute(bias: Tensor | None, chosen: int, normed: bool) -> Substitute:
        def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return choose_experts(hidden_states.reshape(-1, width), packed, num_experts, chosen, normed, bias)

        recipe = Router(packed, chosen, normed, bias)
        return Substitute(forward, recipe, (chosen, normed), ((module, "weight"),), (weight,))

    if isinstance(form, tuple):
        return substitute(own, *form)
    # Not of all sizes: with tiny logits or huge ones, shares are equal, and which of them is chosen is arbitrary.
    x = random_input(INPUT_ROWS, width)
    x = torch.cat([x, x / 4, x * 4])
    # Another bias than its own: one of zeros does not show where it is added, and its neighbours are not compared.
    drawn = None if own is None else random_input(num_experts)
    made = routed(module if drawn is None else partial(functional_call, module, {"bias": drawn}), x)
    for normed in (False, True):
        form = made[2].shape[1], normed
        if all(map(_close, _dense(*substitute(drawn, *form).forward(x)), _dense(*made))):
            return substitute(own, *form)
    raise Unsuitable("does more than choose the largest of its products")


def _close(actual: Tensor, expected: Tensor) -> bool:
    return relative_error(actual, expected) <= TOLERANCE


def routed(module: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a module makes of x [T, D], if it looks like a router's choices. Raises `Unsuitable`."""
    try:
        made: Any = module(x)
    except Exception as error:
        refuse_if_out_of_memory(error)
        raise Unsuitable(f"does not run on a random tensor: {type(error).__name__}") from error
    if not isinstance(made, tuple) or [getattr(each, "ndim", 0) for each in made] != [2, 2, 2]:
        raise Unsuitable("is not a router: it does not return logits, shares and numbers")
    logits, shares, index = made
    fits = shares.shape == index.shape and 0 < index.shape[1] <= logits.shape[1] and index.dtype == torch.int64
    if not fits or any(len(each) != len(x) for each in made):
        raise Unsuitable("is not a router: it does not return logits, shares and numbers")
    return logits, shares, index


def _dense(logits: Tensor, shares: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The logits and, of each expert, its share [T, E], in which order it may have been chosen."""
    return logits, torch.zeros_like(logits).scatter(1, index, shares)
