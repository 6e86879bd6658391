"""The token that each row of scores chooses, as typed functions. CPU and CUDA.

Inference only. Raise `PreconditionFailed` where the library is not built and `RuntimeError`, which names the argument, for wrong
shapes, dtypes, devices or layouts. `reference` says in PyTorch what each computes.
"""

import torch
from torch import Tensor

from shared.ops import refuse_gradient
from shared.ops.library import load


def choose_greedy(logits: Tensor) -> Tensor:
    """logits [T, V] float32, float16, bfloat16 or float64 -> [T] int64, the first of each row's largest."""
    load()
    refuse_gradient(logits)
    tokens: Tensor = torch.ops.neap.choose_greedy.default(logits)
    return tokens


def choose_sampled(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token [T] int64 at each row's uniform number in the running sum of its probabilities, scaled by their sum.

    probabilities [T, V] of the dtypes of `choose_greedy`, uniforms [T] float64 in [0, 1). A token depends on its own row and
    uniform number alone: see docs/decisions/002.
    """
    load()
    refuse_gradient(probabilities)
    tokens: Tensor = torch.ops.neap.choose_sampled.default(probabilities, uniforms)
    return tokens
