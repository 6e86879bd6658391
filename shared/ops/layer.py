"""A whole pre-norm decoder layer as one op: the bits of its modules' kernels, without what lies between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shared.ops import refuse_gradient
from shared.ops.library import load


@dataclass(frozen=True)
class LayerWeights:
    """What a layer is made of. Matrices are packed (`shared.ops.pack_linear`); a bias of no elements is none,
    no biases at all are none of any.

    `norms`: before attention [D], before the MLP [D], and those of query and key heads [Dh] if there are any.
    `packed` and `biases`: queries, keys and values (or all three in one), out, gate and up (`pack_gated_linear`), down.
    """

    norms: Sequence[Tensor]
    packed: Sequence[Tensor]
    biases: Sequence[Tensor]
    num_heads: int
    intermediate: int
    activation: str
    eps: float
    weight_offset: float
    scaling: float
    softcap: float | None = None


class LayerKV(NamedTuple):
    """Where one layer's new keys and values belong: per sequence its stores [1, Hkv, S, Dh], first position and count."""

    keys: list[Tensor]
    values: list[Tensor]
    bases: list[int]
    counts: list[int]


def decoder_layer(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: LayerWeights,
    slots: LayerKV,
    masks: Sequence[Tensor] = (),
) -> Tensor:
    """h = x + out(attention(qkv(norm(x)))), then h + down(activation(gate(norm(h))) * up(norm(h))): x [B, Q, D] -> [B, Q, D].

    Tokens stand sequence after sequence, `slots.counts[s]` of sequence s. Queries and keys are turned by cos, sin [B or 1, Q, R]
    in their first R numbers, halves paired; keys and values are written to their slots, then queries attend as in
    `shared.ops.packed_slot_attention` (no `masks`: all causal). The bits are those of the single ops one after another.
    """
    load()
    refuse_gradient(x)
    out: Tensor = torch.ops.neap.decoder_layer.default(
        x,
        cos,
        sin,
        weights.norms,
        weights.packed,
        weights.biases,
        *slots,
        masks,
        weights.num_heads,
        weights.intermediate,
        weights.activation,
        weights.eps,
        weights.weight_offset,
        weights.scaling,
        weights.softcap,
    )
    return out
