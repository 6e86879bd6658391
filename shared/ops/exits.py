"""The ops of a layer exit after its head, as typed functions: largest logits of the draft vocabulary, confidence head.
CPU and CUDA.

`N` tokens of width `D`. Weights are row-major [out, in], each tensor float32, float16 or bfloat16. Sums are in float32.
`distance` [N] is the place of a token's draft in its chain, at least 1. Inference only. The functions raise
`PreconditionFailed` if the library is not built, and `RuntimeError`, which names the argument, for wrong shapes,
dtypes, devices or layouts. `reference` specifies each in PyTorch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ops.library import begin_call

ROUTE_TOKENS = 8


def draft_top(x: Tensor, rows: Tensor, bias: Tensor | None = None, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """The k (at most 8) largest of x [N, W] float32 @ rows [V, W].T + bias [V], and the log of the sum of all their
    exps.

    -> values [N, k] float32 descending, indices [N, k] int64, log mass [N] float32. Of equal logits the lower index
    comes first. A NaN is never chosen. The logits [N, V] are not stored.
    """
    begin_call(x, rows)
    top: tuple[Tensor, Tensor, Tensor] = torch.ops.neap.draft_top.default(x, rows, bias, k)
    return top


@dataclass(frozen=True)
class ConfidenceWeights:
    """hidden [R, D], bias and output [R], features [3, R], skip [3]. All but `hidden` are float32.

    The gain of the norm is part of `hidden`, its bias part of `bias`, and the slope of a calibration part of `output`,
    `skip` and `shift`.
    """

    hidden: Tensor
    bias: Tensor
    output: Tensor
    features: Tensor
    skip: Tensor
    shift: float
    eps: float


def new_tickets(num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """The counters that `route` needs for up to `num_tokens` tokens. They are 0 before and after each call.
    One call at a time may use them."""
    tiles = (num_tokens + ROUTE_TOKENS - 1) // ROUTE_TOKENS
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def route(
    x: Tensor,
    weights: ConfidenceWeights,
    top: Tensor,
    log_mass: Tensor,
    distance: Tensor,
    lowest: float,
    highest: float,
    tickets: Tensor,
) -> Tensor:
    """The probability of each token's draft [N] float32 in [lowest, highest], from norm and confidence head.
    One launch on a GPU.

    x [N, D], float32 or of the dtype of `hidden`; top [N, k] and log_mass [N] from `draft_top`; distance [N] int64;
    `tickets` from `new_tickets`.
    """
    begin_call(x)
    probability: Tensor = torch.ops.neap.route.default(
        x,
        weights.hidden,
        weights.bias,
        weights.output,
        weights.features,
        weights.skip,
        top,
        log_mass,
        distance,
        weights.shift,
        weights.eps,
        lowest,
        highest,
        tickets,
    )
    return probability
