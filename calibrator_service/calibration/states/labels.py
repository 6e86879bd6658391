"""Labels: the full model's choices, and whether an exit agrees with them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrator_service.calibration.spec import Label
from shared.model.contiguous_runner import ContiguousRunner

# Rows of logits computed at a time.
CHUNK_ROWS = 512


@torch.inference_mode()
def greedy_choices(runner: ContiguousRunner, deep: Tensor) -> Tensor:
    """Deep states [N, D] -> the full model's greedy choices [N] int64."""
    return torch.cat([runner.logits(part).argmax(-1) for part in deep.split(CHUNK_ROWS)])


@torch.inference_mode()
def cosine_converged(runner: ContiguousRunner, state: Tensor, deep: Tensor, threshold: float) -> Tensor:
    """The label of TIDE: whether the cosine of the normed state [N, D] and the normed deep state [N, D] exceeds
    `threshold`.

    Returns bool [N]. Both states go through the final norm.
    """
    early, final = runner.normed(state).float(), runner.normed(deep).float()
    return F.cosine_similarity(early, final, dim=-1) > threshold


def agreement(label: Label, predicted: Tensor, choices: Tensor, converged: Tensor) -> Tensor:
    """What a confidence head learns, bool [N]: the exit's token is the full model's; with the cosine label, the state
    has converged."""
    return predicted == choices if label == "agreement" else converged
