"""The full model's choice of a token at each row of logits, on the device.

A draft is verified by making this choice and comparing: see `shared.model.sampling`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared import ops
from shared.model import host_choices
from shared.model.distribution import (
    candidates,
    constrained,
    drawn,
    masses_of,
    nucleus,
    penalised,
    reads_without_sync,
    unit_mass,
)
from shared.model.sampling import Trial
from shared.ops import NO_TOKEN, choose_greedy, choose_sampled


def choose(logits: Tensor, trials: Sequence[Trial]) -> list[Tensor]:
    """The tokens chosen at each trial's rows, of those that its constraint allows: per trial [n] int64. logits [T, V]
    float: the rows of all trials, trial after trial; where all trials are greedy and nothing changes their scores, what
    `largest` makes of them [T] is enough.

    NO_TOKEN where an allowed logit is NaN, or the largest one is infinite. A row counts only if every draft before it
    is accepted, so rows after the first whose draft is not may be missing from the result. All greedy trials take one
    launch, all others another one. Nothing waits for the device.
    """
    if logits.dim() == 1:
        return list(logits.split_with_sizes([trial.num_rows for trial in trials]))
    num_greedy = sum(trial.sampling.is_greedy for trial in trials)
    if num_greedy == len(trials):
        return list(_largest(logits, trials))
    if num_greedy == 0:
        return list(_drawn(logits, trials))
    rows = logits.split_with_sizes([trial.num_rows for trial in trials])
    chosen: dict[int, Tensor] = {}
    for is_greedy, choices in ((True, _largest), (False, _drawn)):
        members = [i for i, trial in enumerate(trials) if trial.sampling.is_greedy == is_greedy]
        group = torch.cat([rows[index] for index in members])
        chosen |= zip(members, choices(group, [trials[index] for index in members]), strict=True)
    return [chosen[index] for index in range(len(trials))]


def relaxed(logits: Tensor, trials: Sequence[Trial], choices: list[Tensor]) -> list[Tensor]:
    """`choices`, with each draft in place of another choice that its trial accepts all the same (policy relaxed).

    logits and choices as of `choose`. Nothing waits for the device.
    """
    rows = logits.split_with_sizes([trial.num_rows for trial in trials])
    return [
        _relaxed(row_logits, trial, chosen) if trial.is_relaxed else chosen
        for row_logits, trial, chosen in zip(rows, trials, choices, strict=True)
    ]


def _relaxed(logits: Tensor, trial: Trial, choices: Tensor) -> Tensor:
    """Row i of logits [n + 1, V] judges draft i of n; the last row judges none.
    Logits differ as log-probabilities do."""
    num_judged = min(len(choices), len(trial.drafts))
    drafts = torch.tensor(trial.drafts[:num_judged], dtype=torch.int64)
    sure = torch.tensor([trial.is_sure(row) for row in range(num_judged)], dtype=torch.bool)
    drafts, sure = (of_rows.to(logits.device, non_blocking=True) for of_rows in (drafts, sure))
    chosen = choices[:num_judged]
    is_accepted = sure
    if trial.margin is not None:
        scores = logits[:num_judged].gather(1, torch.stack([chosen.clamp(min=0), drafts], 1))
        is_accepted = sure | (scores[:, 0] - scores[:, 1] <= trial.margin)
    accepted = torch.where(is_accepted & (chosen != NO_TOKEN), drafts, chosen)
    return torch.cat([accepted, choices[num_judged:]])


def num_accepted(chosen: Sequence[int], drafts: Sequence[int]) -> int:
    """The number of drafts before the first one that was not chosen."""
    for place, draft in enumerate(drafts):
        if chosen[place] != draft:
            return place
    return len(drafts)


def largest(scores: Tensor) -> Tensor:
    """The token [T] of each row's largest score, the first of equals. scores [T, V] float. NO_TOKEN as in `choose`."""
    if ops.runs_on(scores.device.type):
        return choose_greedy(scores)
    tokens = scores.argmax(-1)  # of a NaN, if there is one
    top = scores.gather(1, tokens[:, None])[:, 0]
    return torch.where(top.isfinite(), tokens, NO_TOKEN)


def drawn_or_largest(logits: Tensor, temperatures: Tensor, least_shares: Tensor, uniforms: Tensor) -> Tensor:
    """The tokens [T] chosen at rows of logits [T, V] float32: drawn at the row's uniform number, or the largest one's
    where the temperature is 0. Drawn of those with at least such a share of the most probable token's probability. The
    other arguments: [T] float64. Reads nothing on the host, so it can be recorded."""
    masses = masses_of(logits, torch.where(temperatures > 0, temperatures, 1.0)[:, None])
    masses.masked_fill_(masses < least_shares[:, None] * unit_mass(masses.shape[1]), 0.0)
    return torch.where(temperatures > 0, _at(masses, uniforms), largest(logits))


def _largest(logits: Tensor, trials: Sequence[Trial]) -> Sequence[Tensor]:
    """The first of the largest allowed scores of each row, after what changes scores."""
    on_host = reads_without_sync(logits.device)
    scores = logits if on_host else constrained(logits, trials)
    for trial in trials:
        if trial.sampling.changes_scores:
            scores = penalised(scores, trials)
            break
    tokens = largest(scores)
    rows: Sequence[Tensor] = [tokens]
    if len(trials) > 1:
        rows = tokens.split_with_sizes([trial.num_rows for trial in trials])
    if not on_host or all(trial.allowed is None for trial in trials):
        return rows
    return [
        chosen if trial.allowed is None else host_choices.allowed_only(chosen, row_scores, trial)
        for chosen, row_scores, trial in zip(rows, scores.split([*map(len, rows)]), trials, strict=True)
    ]


def _drawn(logits: Tensor, trials: Sequence[Trial]) -> Sequence[Tensor]:
    """The token at each position's own uniform number in the position's distribution."""
    if reads_without_sync(logits.device):
        return host_choices.draw(logits, trials)
    scores, masses = candidates(constrained(logits, trials), trials)
    params = [trial.sampling for trial in trials for _ in range(trial.num_rows)]
    numbers = [trial.uniform(row) for trial in trials for row in range(trial.num_rows)]
    tokens = _tokens_at(numbers, nucleus(scores, masses, params))
    rows: Sequence[Tensor] = tokens.split_with_sizes([trial.num_rows for trial in trials])
    return rows


def _tokens_at(numbers: Sequence[float], masses: Tensor) -> Tensor:
    """The token [T] int64 of each row at its uniform number. masses [T, V]."""
    return _at(masses, torch.tensor(numbers, dtype=torch.float64).to(masses.device, non_blocking=True))


def _at(masses: Tensor, uniforms: Tensor) -> Tensor:
    if ops.runs_on(masses.device.type):
        return choose_sampled(masses, uniforms)
    return drawn(masses, uniforms)
