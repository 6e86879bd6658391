"""Greedy choices under a constraint on the host, where a mask is made only for a row whose choice it changes.

The largest of all scores is the largest of the allowed ones, too, if its token is allowed, and the first of equals is
the first there. Whether one token is allowed takes a grammar microseconds; a mask takes as long as some layers.
"""

import numpy as np
import torch
from torch import Tensor

from shared.model.sampling import Trial
from shared.ops.choices import NO_TOKEN


def allowed_only(chosen: Tensor, scores: Tensor, trial: Trial) -> Tensor:
    """The first of the largest allowed scores of each row [n] int64, up to the first row that does not choose its
    draft; a relaxed trial needs all. chosen [n] int64: those of all tokens. scores [n, V] float, on the host.

    NO_TOKEN as for `choose`.
    """
    allowed, rows, tokens = trial.allowed, scores.numpy(), []
    assert allowed is not None
    for row, (draft, token) in enumerate(zip([*trial.drafts, NO_TOKEN], chosen.tolist(), strict=True)):
        # Drafts are allowed. NO_TOKEN may be the fault of a score that does not count.
        if token == NO_TOKEN or (token != draft and not allowed.allows(row, token)):
            forced = allowed.forced(row)
            few = np.flatnonzero(allowed.mask(row)) if forced is None else np.array([forced])
            allowed_scores = rows[row][few]
            best = allowed_scores.argmax()  # of a NaN, if there is one
            token = int(few[best]) if np.isfinite(allowed_scores[best]) else NO_TOKEN
        tokens.append(token)
        if token != draft and not trial.is_relaxed:
            break
    return torch.tensor(tokens)
