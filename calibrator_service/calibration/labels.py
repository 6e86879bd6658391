"""What counts as converged at an exit."""

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrator_service.calibration.spec import Label
from shared.model.runner import Runner


@torch.inference_mode()
def greedy_choices(runner: Runner, deep: Tensor, chunk: int = 512) -> Tensor:
    """Deep states [N, D] -> the full model's greedy choices [N] int64."""
    return torch.cat([runner.logits(part).argmax(-1) for part in deep.split(chunk)])


@torch.inference_mode()
def cosine_converged(runner: Runner, state: Tensor, deep: Tensor, threshold: float) -> Tensor:
    """TIDE's label, like with like: cosine of the *normed* state [N, D] and the *normed* deep state > threshold -> bool [N]."""
    own, final = runner.normed(state).float(), runner.normed(deep).float()
    return F.cosine_similarity(own, final, dim=-1) > threshold


def agreement(label: Label, predicted: Tensor, choices: Tensor, converged: Tensor) -> Tensor:
    """What a router learns, bool [N]: the exit's token is the full model's, or the state has converged (cosine)."""
    return predicted == choices if label == "agreement" else converged
