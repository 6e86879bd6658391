"""Exits that decide from a token's own state alone, by the probability of the token that they propose."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ASKED_AT_ONCE = 512

# States [N, D] at an exit's depth -> logits [N, V] of the exit's vocabulary.
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exit:
    """Tokens leave where the best token's probability reaches `threshold`. `vocabulary` [V]: the tokens of the logits; None for all."""

    logits: Logits
    vocabulary: Tensor | None
    threshold: float

    def __call__(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States [N, D] -> tokens [N], and whether each leaves [N] bool."""
        tokens, probabilities = self.proposals(states)
        return tokens, probabilities >= self.threshold

    @torch.inference_mode()
    def proposals(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """States [N, D] -> the best token of each and its probability, both [N]."""
        best = [self.logits(part).softmax(-1).max(-1) for part in states.split(ASKED_AT_ONCE)]
        indices = torch.cat([part.indices for part in best])
        tokens = indices if self.vocabulary is None else self.vocabulary[indices]
        return tokens, torch.cat([part.values for part in best])
