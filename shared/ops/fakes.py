"""The fake of each op: the shape and dtype of its result, for torch.compile and export. Sizes may be symbolic."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PANEL, HEADER_BYTES = 16, 64


def _check(condition: bool) -> None:
    torch._check(condition)


def _pack_linear(weight: Tensor) -> Tensor:
    _check(weight.dim() == 2)
    panels = (weight.shape[0] + PANEL - 1) // PANEL
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    columns = (weight.shape[1] + pair - 1) // pair * pair
    size = HEADER_BYTES + panels * columns * PANEL * weight.element_size()
    return weight.new_empty(size, dtype=torch.uint8)


def _round_inputs(packed: Tensor) -> None:
    return None


def _packed_linear(x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _choose_packed(x: Tensor, packed: Tensor, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.int64)


def _packed_gated_linear(x: Tensor, gate: Tensor, up: Tensor, out_features: int, *others: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _rms_norm(x, weight, eps)


def _activate(x: Tensor, activation: str) -> Tensor:
    return x.new_empty(x.shape)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    _check(weight.shape[0] == x.shape[-1])
    return x.new_empty(x.shape)


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    _check(cos.shape[-1] == q.shape[-1])
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _contiguous_attention(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    _check(k.shape[3] == q.shape[3])
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _ragged_contiguous_attention(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    _check(k.shape[3] == q.shape[3])
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def _decoder_layers(
    x: Tensor,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    norms: Tensor,
    packed: Tensor,
    biases: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bases: Sequence[int],
    counts: Sequence[int],
    masks: Sequence[Tensor],
    kinds: Sequence[int],
    stops: Sequence[int],
    *others: Any,
) -> Tensor:
    return x.new_empty(len(stops) + 1, *x.shape)


def _choose_experts(
    x: Tensor, router: Tensor, num_experts: int, chosen: int, normed: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    shares = x.new_empty(x.shape[0], chosen)
    return x.new_empty(x.shape[0], num_experts), shares, shares.new_empty(shares.shape, dtype=torch.int64)


def _experts(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape)


def _draft_top(x: Tensor, rows: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    _check(rows.shape[1] == x.shape[1])
    values = x.new_empty(x.shape[0], k)
    return values, values.new_empty(values.shape, dtype=torch.int64), x.new_empty(x.shape[0])


def _route(x: Tensor, hidden: Tensor, *others: Any) -> Tensor:
    _check(hidden.shape[1] == x.shape[1])
    return x.new_empty(x.shape[0], dtype=torch.float32)


def _draft_chains(states: Tensor, outputs: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, drafts = states.shape[0] + outputs.shape[0], others[-1]
    probabilities = states.new_empty(count, drafts)
    tokens = probabilities.new_empty(probabilities.shape, dtype=torch.int64)
    lengths = probabilities.new_empty(count, dtype=torch.int64)
    return tokens, probabilities, lengths, states.new_empty(count, drafts, outputs.shape[1])


def _choose_greedy(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _choose_sampled(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    _check(uniforms.shape[0] == probabilities.shape[0])
    return _choose_greedy(probabilities)


def _paged_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Tensor:
    _check(k.shape[2] == q.shape[2])
    _check(keys.shape[3] == k.shape[2])
    _check(values.shape[3] == v.shape[2])
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def register() -> None:
    """Registers the fakes. The library must be loaded."""
    fakes: dict[str, Callable[..., Any]] = {
        "pack_linear": _pack_linear,
        "round_inputs_": _round_inputs,
        "packed_linear": _packed_linear,
        "choose_packed": _choose_packed,
        "packed_gated_linear": _packed_gated_linear,
        "rms_norm": _rms_norm,
        "layer_norm": _layer_norm,
        "activate": _activate,
        "rotary": _rotary,
        "contiguous_attention": _contiguous_attention,
        "ragged_contiguous_attention": _ragged_contiguous_attention,
        "decoder_layers": _decoder_layers,
        "choose_experts": _choose_experts,
        "experts": _experts,
        "draft_top": _draft_top,
        "route": _route,
        "draft_chains": _draft_chains,
        "choose_greedy": _choose_greedy,
        "choose_sampled": _choose_sampled,
        "paged_attention": _paged_attention,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"neap::{name}", fake)
