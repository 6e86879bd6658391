"""A layer exit on neap's kernels: what `LayerExit`'s head, the draft vocabulary's rows and the router compute, without PyTorch
between them and with weights of half the size."""

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


def stored(weight: Tensor) -> Tensor:
    """A weight as the kernels read it: float16, since reading it is all the time there is; float32 where a number does not fit."""
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
        return cls(stored(rows), None if bias is None else bias.float().contiguous())


def router_weights(router: DepthRouter) -> RouterWeights:
    """A router's weights with its calibration folded in."""
    slope = router.slope.detach()
    return RouterWeights(
        hidden=stored(router.hidden.weight),
        bias=router.hidden.bias.detach().clone(),
        output=(slope * router.output.weight[0]).detach(),
        features=router.scalars.weight.detach().T.contiguous(),
        skip=(slope * router.skip.weight[0]).detach(),
        shift=float(slope * router.output.bias + router.shift),
        eps=EPSILON,
    )


class FusedExit:
    """One exit. Its weights are copies, on the device of the originals."""

    def __init__(self, head: ExitHead, router: DepthRouter, drafts: DraftRows) -> None:
        gated = head.form == "gated"
        adds_states = gated and head.head_width == head.hidden_size
        self._mix, self._offset = stored(head.mix), head.offset.detach().contiguous()
        self._out = stored(head.out) if gated else None
        self._scale = head.scale.detach().contiguous() if adds_states else None
        self._gain = head.gain.detach().contiguous()
        self._drafts = drafts
        self.router = router_weights(router)
        self._tickets = new_tickets(8, self._mix.device)

    def __call__(self, state: Tensor, deep_state: Tensor, ago: Tensor) -> tuple[Tensor, Tensor]:
        """state and deep state [N, D], ago [N] int64 (as in `ExitHead`) -> places in the draft vocabulary [N], probabilities [N]."""
        if len(state) > len(self._tickets) * ROUTE_TOKENS:
            self._tickets = new_tickets(len(state), self._mix.device)
        adapted = exit_head(
            state, deep_state, ago, self._mix, self._offset, self._out, self._scale, self._gain, EPSILON
        )  # fmt: skip
        top, indices, log_mass = draft_top(adapted, self._drafts.rows, self._drafts.bias, 2)
        probabilities = route(
            adapted, self.router, top, log_mass, ago, LOWEST, HIGHEST, self._tickets
        )
        return indices[:, 0], probabilities


def is_supported(device: torch.device, vocabulary_size: int) -> bool:
    """Whether the kernels run there, on a draft vocabulary of so many tokens."""
    return vocabulary_size > 1 and library.runs_on(device.type)
