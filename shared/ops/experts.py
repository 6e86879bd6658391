"""MLPs of which each token passes a few, chosen by a router: what a mixture of experts adds to its layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.ops import begin_call


def expert_table(packed: Sequence[Tensor], inner_bias: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The experts as one argument of an op, uint8: gate [I, D], up [I, D] and down [D, I] of each, packed, one expert
    after another. `inner_bias` [E, 2 * I]: of gates, and behind those of ups; `bias` [E, D]: of downs; float32. Keeps
    all alive. Raises `RuntimeError` if their sizes differ."""
    begin_call()
    table: Tensor = torch.ops.neap.expert_table.default(packed, inner_bias, bias)
    return table


def choose_experts(
    x: Tensor, router: Tensor, num_experts: int, chosen: int, normed: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The router's logits [T, E] of tokens x [T, D] float32, the shares of each token's `chosen` experts [T, chosen],
    and their numbers, int64: those of the largest logits, the largest one first. `router`: a packed matrix [E, D].
    `bias` [E]: added to its products.

    Shares are the softmax of all logits; if `normed`, divided by the sum of those chosen.
    """
    begin_call(x)
    logits, shares, index = torch.ops.neap.choose_experts.default(x, router, num_experts, chosen, normed, bias)
    return logits, shares, index


def experts(x: Tensor, index: Tensor, shares: Tensor, table: Tensor, activation: str) -> Tensor:
    """The sum of each token's experts, each times its share, in the order of its choices: x [T, D] float32 -> [T, D].

    An expert is down(activation(gate(x)) * up(x)). `index` [T, k] int64: the experts of each token; a number beyond the
    last one stands for none. `shares` [T, k]. `table`: see `expert_table`. `activation` as in `shared.ops.activate`.
    """
    begin_call(x, shares)
    out: Tensor = torch.ops.neap.experts.default(x, index, shares, table, activation)
    return out
