"""A layer exit on neap's kernels: exit head, draft vocabulary and router as fused ops with float16 weights.

It computes what `LayerExit`'s modules compute in PyTorch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ladder.heads import EPSILON, ExitHead
from shared.ladder.routers import HIGHEST, LOWEST, DepthRouter
from shared.ops import library
from shared.ops.exits import (
    ROUTE_TOKENS,
    RouterWeights,
    draft_top,
    exit_head,
    new_tickets,
    route,
)

LARGEST_HALF = 65504.0


def kernel_weight(weight: Tensor) -> Tensor:
    """A contiguous copy for the kernels: float16, or float32 if a number exceeds float16's range.

    The kernels are bound by reading weights, so half the size is about half the time.
    """
    weight = weight.detach().float()
    fits = bool(weight.abs().max() <= LARGEST_HALF) if weight.numel() else True
    return (weight.half() if fits else weight).contiguous()


@dataclass(frozen=True)
class DraftRows:
    """The LM head's rows [Vd, W] and biases [Vd] of the draft vocabulary, for all exits of a ladder."""

    rows: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, rows: Tensor, bias: Tensor | None) -> "DraftRows":
        return cls(kernel_weight(rows), None if bias is None else bias.float().contiguous())


def router_weights(router: DepthRouter) -> RouterWeights:
    """A router's weights, with its calibration (slope and shift) folded into the output layer."""
    slope = router.slope.detach()
    return RouterWeights(
        hidden=kernel_weight(router.hidden.weight),
        bias=router.hidden.bias.detach().clone(),
        output=(slope * router.output.weight[0]).detach(),
        features=router.scalars.weight.detach().T.contiguous(),
        skip=(slope * router.skip.weight[0]).detach(),
        shift=float(slope * router.output.bias + router.shift),
        eps=EPSILON,
    )


class KernelDraws:
    """The K most probable drafts of adapted states [N, W].

    `num_drafts`: K, at least 2, as the router compares two. `num_tokens`: the most tokens of a call that is recorded. Larger calls replace a tensor that a recording would go on using.
    """

    def __init__(
        self,
        router: DepthRouter,
        drafts: DraftRows,
        num_drafts: int = 2,
        num_tokens: int = ROUTE_TOKENS,
    ) -> None:
        self._drafts, self._num_drafts = drafts, min(num_drafts, len(drafts.rows))
        self.router = router_weights(router)
        self._tickets = new_tickets(num_tokens, drafts.rows.device)

    def __call__(self, adapted: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Indices into the draft vocabulary [N, K] int64, the most probable first, and probabilities [N, K]. `distance` [N] int64: as
        `ExitHead.forward` takes it."""
        if len(adapted) > len(self._tickets) * ROUTE_TOKENS:
            self._tickets = new_tickets(len(adapted), adapted.device)
        top, indices, log_mass = draft_top(
            adapted, self._drafts.rows, self._drafts.bias, self._num_drafts
        )
        first = route(adapted, self.router, top, log_mass, distance, LOWEST, HIGHEST, self._tickets)
        return indices, with_others(first, (top - log_mass[:, None]).exp())


def with_others(first: Tensor, shares: Tensor) -> Tensor:
    """The probabilities [N, K] of drafts of which a router has judged the first: `first` [N]. `shares` [N, K]: the head's own
    probabilities. The others share what is left as the head would."""
    left = ((1 - first) / (1 - shares[:, 0]).clamp_min(1e-6))[:, None]
    return torch.cat([first[:, None], (left * shares[:, 1:]).clamp(0, 1)], 1)


class FusedExit:
    """One exit. Holds copies of the weights, on the device of the originals."""

    def __init__(self, head: ExitHead, router: DepthRouter, drafts: DraftRows) -> None:
        gated = head.form == "gated"
        adds_states = gated and head.head_width == head.hidden_size
        self._mix, self._offset = kernel_weight(head.mix), head.offset.detach().contiguous()
        self._out = kernel_weight(head.out) if gated else None
        self._scale = head.scale.detach().contiguous() if adds_states else None
        self._gain = head.gain.detach().contiguous()
        self._draws = KernelDraws(router, drafts)

    def __call__(
        self, state: Tensor, deep_state: Tensor, distance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Indices into the draft vocabulary [N] int64 and probabilities [N].

        `state` and `deep_state` [N, D], `distance` [N] int64: as `ExitHead.forward` takes them.
        """
        adapted = exit_head(
            state, deep_state, distance, self._mix, self._offset, self._out, self._scale, self._gain, EPSILON
        )  # fmt: skip
        indices, probabilities = self._draws(adapted, distance)
        return indices[:, 0], probabilities[:, 0]


def is_supported(device: torch.device, vocabulary_size: int) -> bool:
    """Whether the kernels run on `device` with a draft vocabulary of `vocabulary_size` tokens."""
    return vocabulary_size > 1 and library.runs_on(device.type)
