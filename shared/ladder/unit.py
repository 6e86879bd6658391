"""The norm that every part of an exit applies to the states it reads."""

import torch
from torch import Tensor

EPSILON = 1e-6


def unit(state: Tensor) -> Tensor:
    """States [..., D] scaled to a root mean square of 1, in float32.
    Without it, depths differ by orders of magnitude."""
    state = state.float()
    return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + EPSILON)
