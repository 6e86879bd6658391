"""A whole pre-norm decoder layer as one op. It gives the same bits as the kernels of its modules, without the overhead between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shared.ops import refuse_gradient
from shared.ops.library import load


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer.

    `norms`: before attention [D], before the MLP [D], and those of query and key heads [Dh] if there are any. `packed`: queries, keys and
    values, or all three in one; out; gate; up; down. `biases`: in the same order, but one for gate and up together (gate's, then up's);
    an empty tensor where there is none, or an empty list if there are none at all.
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
    """Where the new keys and values of one layer are written.

    Per sequence its tensors [1, Hkv, S, Dh], the first position of its new tokens, and their number.
    """

    keys: list[Tensor]
    values: list[Tensor]
    bases: list[int]
    counts: list[int]


# The steps that `profile_layers` tells apart. "place": head norms, rotary positions, and writing keys and values.
STEPS = ("norms", "products", "place", "attention")


def profile_layers(is_on: bool) -> dict[str, float]:
    """Seconds of each of STEPS in `decoder_layer` since the last call, and measures or not from now on. No layer may be running.

    One thread's clock: a step ends when all threads have ended it, so their waiting for each other counts.
    """
    load()
    seconds: Tensor = torch.ops.neap.profile_layers.default(is_on)
    return dict(zip(STEPS, seconds.tolist(), strict=True))


def decoder_layer(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: LayerWeights,
    kv: LayerKV,
    masks: Sequence[Tensor] = (),
) -> Tensor:
    """h = x + out(attention(qkv(norm(x)))), then h + down(activation(gate(norm(h))) * up(norm(h))): x [B, Q, D] -> [B, Q, D].

    The tokens of x are those of all sequences, one after another: `kv.counts[s]` of sequence s. The first R numbers of queries and keys
    are rotated by cos, sin [B or 1, Q, R], halves paired. Keys and values are written to `kv`, then queries attend as in
    `shared.ops.ragged_contiguous_attention`; without `masks`, all causally. The bits are those of the single ops, called one after another.
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
        *kv,
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
