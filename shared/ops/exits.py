"""The ops of a layer exit as typed functions: head, best of the draft vocabulary, router. CPU and CUDA.

`N` tokens of width `D`; weights are row-major [out, in], float32, float16 or bfloat16, each tensor as it likes; sums are taken in
float32. Inference only. Raise `PreconditionFailed` where the library is not built and `RuntimeError`, which names the argument,
for wrong shapes, dtypes, devices or layouts. `reference` says in PyTorch what each computes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ops import refuse_gradient
from shared.ops.library import load

ROUTE_TOKENS = 8


def exit_head(
    state: Tensor,
    deep_state: Tensor,
    ago: Tensor,
    mix: Tensor,
    offset: Tensor,
    out: Tensor | None,
    scale: Tensor | None,
    gain: Tensor,
    eps: float,
) -> Tensor:
    """state, deep_state [N, D], ago [N] int64 -> the LM head's input [N, W] float32, normed, times `gain` [W].

    mix [I, 2 * D] over both states, normed; plus offset [O, I] float32, row `ago`, at most the last. Without `out`: I = W. With
    `out` [W, I / 2]: silu(first half) * second half goes through it, and where W = D, `scale` [2, D] times the states is added."""
    load()
    refuse_gradient(state, deep_state, mix)
    adapted: Tensor = torch.ops.neap.exit_head.default(
        state, deep_state, ago, mix, offset, out, scale, gain, eps
    )
    return adapted


def draft_top(
    x: Tensor, rows: Tensor, bias: Tensor | None = None, k: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """The k (at most 8) largest of x [N, W] float32 @ rows [V, W].T + bias [V], and the log of the sum of all their exps.

    -> values [N, k] float32 descending, indices [N, k] int64, log mass [N] float32. Of equals the lower index comes first; a NaN is
    never chosen. The logits [N, V] are never held.
    """
    load()
    refuse_gradient(x, rows)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.neap.draft_top.default(x, rows, bias, k)
    return found


@dataclass(frozen=True)
class RouterWeights:
    """hidden [R, D], bias and output [R], features [3, R], skip [3]: all but `hidden` float32.

    A gain of the norm belongs into `hidden`, its bias into `bias`, a calibrating slope into `output`, `skip` and `shift`.
    """

    hidden: Tensor
    bias: Tensor
    output: Tensor
    features: Tensor
    skip: Tensor
    shift: float
    eps: float


def new_tickets(num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """What `route` needs for up to `num_tokens` tokens: zeros, and zeros again after each call. One call at a time may use it."""
    tiles = (num_tokens + ROUTE_TOKENS - 1) // ROUTE_TOKENS
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def route(
    x: Tensor,
    weights: RouterWeights,
    top: Tensor,
    log_mass: Tensor,
    ago: Tensor,
    lowest: float,
    highest: float,
    tickets: Tensor,
) -> Tensor:
    """How probable each token's draft is, from norm and router, on a GPU in one launch -> [N] float32 in [lowest, highest].

    x [N, D], float32 or of the dtype of `hidden`; top [N, k] and log_mass [N] as `draft_top` gives them, ago [N] int64; `tickets` from `new_tickets`.
    """
    load()
    refuse_gradient(x)
    probability: Tensor = torch.ops.neap.route.default(
        x,
        weights.hidden,
        weights.bias,
        weights.output,
        weights.features,
        weights.skip,
        top,
        log_mass,
        ago,
        weights.shift,
        weights.eps,
        lowest,
        highest,
        tickets,
    )
    return probability
