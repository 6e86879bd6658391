"""Which drafts the full model confirms."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shared.model.sampling import SamplingParams, choose
from shared.ops import library
from shared.ops.batches import verify_greedy

NOTHING = -1


def confirmed_greedily(logits: Tensor, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What the full model chooses for each sequence: the drafts it confirms, and the token it chooses after them.

    logits [T, V]: for each sequence a row per draft and one more, in turn. One launch and one read-back for all; without the
    kernels PyTorch does the same in a few.
    """
    tested = [token for own in drafts for token in (*own, NOTHING)]
    starts = list(accumulate((len(own) + 1 for own in drafts), initial=0))
    if library.runs_on(logits.device.type):
        device = logits.device
        choices, counts = verify_greedy(
            logits, torch.tensor(tested, device=device), torch.tensor(starts, device=device)
        )
        answer = torch.cat([choices, counts]).tolist()
        chosen, accepted = answer[: len(tested)], answer[len(tested) :]
    else:
        chosen = logits.argmax(-1).tolist()
        accepted = [
            _prefix(chosen[start:], own) for start, own in zip(starts, drafts, strict=False)
        ]
    return [
        chosen[start : start + count + 1] for start, count in zip(starts, accepted, strict=False)
    ]


def confirmed_by_sampling(
    logits: Tensor, sampling: SamplingParams, context: Sequence[int], drafts: Sequence[int]
) -> list[int]:
    """The drafts that sampling after `context` confirms, and the token it chooses after them. logits [1 + drafts, V].

    A draft is tested by choosing as the full model would: see `shared.model.sampling`. Row by row, for what a row's distribution
    costs is spent only if all drafts before it were right.
    """
    chosen: list[int] = []
    for row, draft in zip(logits, [*drafts, NOTHING], strict=True):
        token = choose(row, sampling, [*context, *chosen])
        chosen.append(token)
        if token != draft:
            break
    return chosen


def _prefix(chosen: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of the drafts were chosen before the first that was not."""
    return next((i for i, draft in enumerate(drafts) if chosen[i] != draft), len(drafts))
