"""Choices on the host: greedy ones under a constraint, and tokens drawn from the few that can be drawn.

A mask is made only for a row whose greedy choice it changes. The largest of all scores is the largest of the allowed
ones, too, if its token is allowed, and the first of equals is the first there. Whether one token is allowed takes a
grammar microseconds; a mask takes as long as some layers.

Drawn tokens are those of `nucleus` and `drawn` of `shared.model.distribution`, which take whole rows through every
filter. Most tokens of a row have no mass, or are not among the most probable ones that a filter keeps. They are left
out first, so one thread is faster than many.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.model.distribution import penalised, unit_mass
from shared.model.sampling import SamplingParams, Trial
from shared.ops import NO_TOKEN


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


# A token whose logit over the temperature is lower than the largest one's by this and by the logarithm of the unit has
# no mass.
BELOW_HALF = 0.8
# Tokens that are sorted at first to find a nucleus, and how many times as many the next time.
FIRST_SORTED, MORE_SORTED = 512, 8
LOWEST = float(np.finfo(np.float32).min) / 2
# Numbers at a time. The library that computes exponentials takes threads for 4,096, and waiting for them takes longer
# than they save.
PIECE = 1 << 11
# Numbers of a column in the search for the k-th largest.
COLUMN = 8

Floats = npt.NDArray[np.float32]
Masses = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]


def draw(logits: Tensor, trials: Sequence[Trial]) -> list[Tensor]:
    """The tokens drawn at each trial's rows, up to the first whose draft is not accepted: per trial [n] int64. logits
    [T, V] float on the host.

    NO_TOKEN as for `choose`. Temperatures must be positive.
    """
    rows = penalised(logits, trials).float().numpy()
    ends = np.cumsum([0, *(trial.num_rows for trial in trials)])
    return [
        torch.tensor(_drawn_in_turn(rows[start:end], trial))
        for (start, end), trial in zip(pairwise(ends), trials, strict=True)
    ]


def _drawn_in_turn(rows: Floats, trial: Trial) -> list[int]:
    chosen: list[int] = []
    for number in range(trial.num_rows):
        scores = rows[number]
        if trial.allowed is not None:
            # By one thread, which is faster than many beside other work.
            scores = np.where(trial.allowed.mask(number), scores, np.float32(-np.inf))
        chosen.append(token_at(trial.uniform(number), scores, trial.sampling))
        is_last = number == len(trial.drafts)
        if is_last or (chosen[-1] != trial.drafts[number] and not trial.is_sure(number)):
            break
    return chosen


def token_at(uniform: float, scores: Floats, sampling: SamplingParams) -> int:
    """The token of a row [V] at a uniform number."""
    largest = scores.max()
    if not np.isfinite(largest):
        return NO_TOKEN
    tokens, masses = masses_of_few(scores, float(largest), sampling)
    if sampling.top_p < 1.0:
        masses = _within_top_p(scores[tokens], masses, sampling.top_p)
    if sampling.min_p:
        masses[masses < sampling.min_p * unit_mass(len(scores))] = 0.0
    running = masses.cumsum()
    # Rounding may put the point past the last token that has any mass.
    place = min(running.searchsorted(uniform * running[-1], side="right"), running.searchsorted(running[-1]))
    return int(tokens[place])


def masses_of_few(scores: Floats, largest: float, sampling: SamplingParams) -> tuple[Tokens, Masses]:
    """Tokens, ascending, and their masses after temperature and top-k; all others have none.
    As of `distribution.candidates`."""
    size, temperature = len(scores), sampling.temperature
    unit = unit_mass(size)
    if 0 < sampling.top_k < size:
        least = _kth_largest(scores, sampling.top_k)
    else:
        bound = largest - temperature * (math.log(unit) + BELOW_HALF)
        none = np.float32(-np.inf)
        least = np.nextafter(np.float32(bound), none) if bound > LOWEST else none
    tokens = np.flatnonzero(scores >= least)
    masses = scores[tokens].astype(np.float64)
    for part in torch.from_numpy(masses).split(PIECE):
        # PyTorch's exponential function, because NumPy's has other bits on other processors.
        part.sub_(largest).div_(temperature).exp_().mul_(unit).round_()
    return tokens, masses


def _kth_largest(scores: Floats, count: int) -> np.float32:
    # So many columns of the row have a largest number that is not below the one sought.
    # Fewer numbers than all are left to look at.
    width = len(scores) // COLUMN
    if width > count:
        largest = scores[: COLUMN * width].reshape(COLUMN, width).max(0)
        scores = scores[scores >= np.partition(largest, width - count)[width - count]]
    at = len(scores) - count
    kth: np.float32 = np.partition(scores, at)[at]
    return kth


def _within_top_p(scores: Floats, masses: Masses, top_p: float) -> Masses:
    """Masses [n], set to 0 where the more probable tokens already sum to the share `top_p` of all or more. The most
    probable token is kept."""
    bound, num_sorted = masses.sum() * top_p, FIRST_SORTED
    few: Tokens
    while num_sorted < len(scores):
        few = np.flatnonzero(scores >= _kth_largest(scores, num_sorted))
        if masses[few].sum() >= bound:
            break
        num_sorted *= MORE_SORTED
    else:
        few = np.arange(len(scores))
    order = few[np.argsort(-scores[few], kind="stable")]
    ordered = masses[order]
    before = ordered.cumsum() - ordered
    remaining = np.zeros_like(masses)
    remaining[order] = np.where(before >= bound, 0.0, ordered)
    return remaining
