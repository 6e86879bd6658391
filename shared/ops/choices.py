"""The choice of a token for each row of scores, as typed functions. CPU and CUDA.

Inference only. The functions raise `PreconditionFailed` if the library is not built, and `RuntimeError`, which names
the argument, for wrong shapes, dtypes, devices or layouts. `reference` specifies each in PyTorch.
"""

import torch
from torch import Tensor

from shared.ops.library import begin_call

# The choice of a row that is not finite. It is no index of a token.
NO_TOKEN = -1


def choose_greedy(logits: Tensor) -> Tensor:
    """logits [T, V] float32, float16, bfloat16 or float64 -> [T] int64: the index of each row's largest score, the
    first one of equals.

    NO_TOKEN where a score is NaN, or the largest one is infinite.
    """
    begin_call(logits)
    tokens: Tensor = torch.ops.neap.choose_greedy.default(logits)
    return tokens


def choose_sampled(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token [T] int64 of each row: where uniform number * sum of the probabilities falls in their running sum.

    probabilities [T, V] of the dtypes of `choose_greedy`, uniforms [T] float64 in [0, 1). A token depends only on its
    own row and uniform number: see docs/decisions/002. NO_TOKEN where the sum is not finite, or 0.
    """
    begin_call(probabilities)
    tokens: Tensor = torch.ops.neap.choose_sampled.default(probabilities, uniforms)
    return tokens
