"""The confidence heads of layer exits: norm -> 128 -> SiLU -> 1, then calibrated."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.ladder.exit_head import unit
from shared.ladder.proposers import DEFAULT_CONFIDENCE_WIDTH

# Inputs beside the adapted state: see `scalar_features`.
NUM_SCALARS = 3
# Bounds of every probability a confidence head returns.
LOWEST, HIGHEST = 1e-3, 0.999


def scalar_features(logits: Tensor, place: Tensor) -> Tensor:
    """Scalar inputs of a `ConfidenceHead`: log p(top), p(top) - p(second), (place - 1) / 4.

    `logits` [..., Vd] of the draft vocabulary; `place` [...] >= 1: of the draft in its chain.
    Returns [..., NUM_SCALARS].
    """
    top = torch.topk(logits, min(2, logits.shape[-1]), dim=-1).values
    log_mass = torch.logsumexp(logits, -1)
    first = top[..., 0] - log_mass
    second = (top[..., -1] - log_mass).exp() if logits.shape[-1] > 1 else torch.zeros_like(first)
    return torch.stack([first, first.exp() - second, (place - 1).to(first.dtype) / 4], -1)


class ConfidenceHead(nn.Module):
    """Probability that the exit's token is the full model's greedy choice.

    The confidence head normalises its input itself, so training and serving run the same forward.
    """

    def __init__(self, head_width: int, width: int = DEFAULT_CONFIDENCE_WIDTH) -> None:
        super().__init__()
        self.hidden = nn.Linear(head_width, width)
        self.scalars = nn.Linear(NUM_SCALARS, width, bias=False)
        self.output = nn.Linear(width, 1)
        self.skip = nn.Linear(NUM_SCALARS, 1, bias=False)
        self.slope = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1))

    def score(self, adapted: Tensor, scalars: Tensor) -> Tensor:
        """Uncalibrated log-odds [...] from the adapted state [..., head_width] and scalar features [...,
        NUM_SCALARS]."""
        inner = F.silu(self.hidden(unit(adapted)) + self.scalars(scalars))
        score: Tensor = (self.output(inner) + self.skip(scalars))[..., 0]
        return score

    def forward(self, adapted: Tensor, scalars: Tensor) -> Tensor:
        """Calibrated probability [...], in [LOWEST, HIGHEST]. Arguments as in `score`."""
        logit = self.slope * self.score(adapted, scalars) + self.shift
        return torch.sigmoid(logit).clamp(LOWEST, HIGHEST)
