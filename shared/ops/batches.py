"""The ops on a batch as typed functions: drafts verified. CPU and CUDA.

Inference only. Raise `PreconditionFailed` where the library is not built and `RuntimeError`, which names the argument, for wrong
shapes, dtypes, devices or layouts. `reference` says in PyTorch what each computes.
"""

import torch
from torch import Tensor

from shared.ops import refuse_gradient
from shared.ops.library import load


def verify_greedy(logits: Tensor, drafts: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """What the full model chooses at each row, and how many drafts of each sequence that confirms.

    logits [T, V] float32, float16, bfloat16 or float64; rows [starts[s], starts[s + 1]) are sequence s's (starts [S + 1] int64).
    drafts [T] int64: what was drafted at the row; a sequence's last row tests nothing.
    -> choices [T] int64, the first of the largest; num_accepted [S] int64, the longest prefix of drafts that were chosen. What
    follows them is choices[starts[s] + num_accepted[s]].
    """
    load()
    refuse_gradient(logits)
    verified: tuple[Tensor, Tensor] = torch.ops.neap.verify_greedy.default(logits, drafts, starts)
    return verified


def verify_sampled(
    probabilities: Tensor,
    drafts: Tensor,
    starts: Tensor,
    uniforms: Tensor,
    proposed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `verify_greedy` for sampled tokens: speculative rejection sampling (2211.17192), one uniform number [0, 1) a row.

    probabilities [T, V] of the full model, uniforms [T] float64. With `proposed` [T, V], the distribution that the draft was drawn
    from: accepted where u * proposed < probability, else drawn from what probability exceeds proposed by, with u again, which is
    uniform given the rejection; rows of both must sum to 1. Without: drafts are certain, and the token is the one at u in the
    running sum of the probabilities, which accepts a draft as often as rejection sampling would, and depends on u alone
    (docs/decisions/002). A row whose draft is no token (-1) draws from the probabilities.
    """
    load()
    refuse_gradient(probabilities)
    verified: tuple[Tensor, Tensor] = torch.ops.neap.verify_sampled.default(
        probabilities, drafts, starts, uniforms, proposed
    )
    return verified
