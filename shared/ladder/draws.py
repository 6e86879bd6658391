"""The most probable draft of a head's adapted states: on neap's kernels, with float16 weights, or in PyTorch."""

import copy
from typing import Protocol, Self

import torch
from torch import Tensor

from shared import ops
from shared.ladder.confidence_head import HIGHEST, LOWEST, ConfidenceHead, scalar_features
from shared.ladder.exit_head import EPSILON
from shared.ladder.head_rows import Matmul
from shared.ops.chains import ROUTE_TOKENS, ConfidenceWeights, draft_top, new_tickets, route

LARGEST_HALF = 65504.0


class Draws(Protocol):
    """What an exit's head and confidence head make of its outputs."""

    def __call__(self, adapted: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Adapted states [N, W] and places in chains [N] int64 >= 1 -> indices into the draft vocabulary [N] int64 and
        probabilities [N]."""

    def with_confidence(self, confidence: ConfidenceHead) -> Self:
        """The same with another confidence head. What both have in common is in memory once."""

    def held(self) -> list[Tensor | None]:
        """The tensors that it keeps in memory."""


def kernel_weight(weight: Tensor) -> Tensor:
    """A contiguous copy for the kernels: float16, or float32 if a number exceeds float16's range.

    The kernels are bound by reading weights, so half the size is about half the time.
    """
    weight = weight.detach().float()
    fits = bool(weight.abs().max() <= LARGEST_HALF) if weight.numel() else True
    return (weight.half() if fits else weight).contiguous()


def confidence_weights(confidence: ConfidenceHead) -> ConfidenceWeights:
    """A confidence head's weights, with its calibration (slope and shift) folded into the output layer."""
    slope = confidence.slope.detach()
    return ConfidenceWeights(
        hidden=kernel_weight(confidence.hidden.weight),
        bias=confidence.hidden.bias.detach().clone(),
        output=(slope * confidence.output.weight[0]).detach(),
        features=confidence.scalars.weight.detach().T.contiguous(),
        skip=(slope * confidence.skip.weight[0]).detach(),
        shift=float(slope * confidence.output.bias + confidence.shift),
        eps=EPSILON,
    )


class KernelDraws:
    """`Draws` on the kernels. `rows` [Vd, W] and `bias` [Vd]: the LM head's, of the draft vocabulary.

    `num_tokens`: the most tokens of a call that is recorded. Larger calls replace a tensor that a recording would go on
    using.
    """

    def __init__(
        self,
        confidence: ConfidenceHead,
        rows: Tensor,
        bias: Tensor | None,
        num_tokens: int = ROUTE_TOKENS,
    ) -> None:
        self._rows = kernel_weight(rows)
        self._bias = None if bias is None else bias.float().contiguous()
        self._num_tokens = num_tokens
        self._take(confidence)

    def _take(self, confidence: ConfidenceHead) -> None:
        self.confidence = confidence_weights(confidence)
        self._tickets = new_tickets(self._num_tokens, self._rows.device)

    def with_confidence(self, confidence: ConfidenceHead) -> Self:
        """See `Draws`."""
        other = copy.copy(self)
        other._take(confidence)
        return other

    def held(self) -> list[Tensor | None]:
        """See `Draws`."""
        return [self._rows, self._bias, self._tickets, *self.confidence.held()]

    def __call__(self, adapted: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Draws`."""
        if len(adapted) > len(self._tickets) * ROUTE_TOKENS:
            self._tickets = new_tickets(len(adapted), adapted.device)
        # Two, because the confidence head compares them.
        top, indices, log_mass = draft_top(adapted, self._rows, self._bias, 2)
        return indices[:, 0], route(adapted, self.confidence, top, log_mass, places, LOWEST, HIGHEST, self._tickets)


class PlainDraws:
    """What `KernelDraws` computes, in PyTorch. `project` maps adapted states to logits [N, Vd]."""

    def __init__(self, confidence: ConfidenceHead, project: Matmul) -> None:
        self._confidence, self._project = confidence, project

    def __call__(self, adapted: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `Draws`."""
        logits = self._project(adapted)
        return logits.argmax(-1), self._confidence(adapted, scalar_features(logits, places))

    def with_confidence(self, confidence: ConfidenceHead) -> Self:
        """See `Draws`."""
        return type(self)(confidence, self._project)

    def held(self) -> list[Tensor | None]:
        """See `Draws`."""
        return [*self._confidence.parameters(), *self._project.held()]


def is_supported(device: torch.device, vocabulary_size: int) -> bool:
    """Whether the kernels run on `device` with a draft vocabulary of `vocabulary_size` tokens."""
    return vocabulary_size > 1 and ops.runs_on(device.type)
