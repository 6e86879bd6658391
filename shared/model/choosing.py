"""What the full model chooses at each row of logits: the verification of drafts, on the device.

Verifying a draft is choosing as the full model would and comparing: see `shared.model.sampling`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.model.distribution import (
    candidates,
    drawn,
    is_read_for_nothing,
    nucleus,
    penalised,
)
from shared.model.sampling import Trial
from shared.ops import library
from shared.ops.choices import choose_greedy, choose_sampled


def choose(logits: Tensor, trials: Sequence[Trial]) -> list[Tensor]:
    """Per trial the tokens chosen at its rows [n] int64. logits [T, V], float: the trials' rows, in turn.

    A row counts only if all before it chose their drafts; behind the first that did not, rows may be missing. One launch for all
    greedy trials and one for all others, and nothing waits for the device.
    """
    num_greedy = sum(trial.sampling.is_greedy for trial in trials)
    if num_greedy == len(trials):
        return list(_largest(logits, trials))
    if num_greedy == 0:
        return list(_drawn(logits, trials))
    rows = logits.split_with_sizes([trial.num_rows for trial in trials])
    chosen: dict[int, Tensor] = {}
    for is_greedy, choices in ((True, _largest), (False, _drawn)):
        members = [i for i, own in enumerate(trials) if own.sampling.is_greedy == is_greedy]
        group = torch.cat([rows[index] for index in members])
        chosen |= zip(members, choices(group, [trials[index] for index in members]), strict=True)
    return [chosen[index] for index in range(len(trials))]


def num_confirmed(chosen: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of the drafts were chosen before the first that was not."""
    return next((i for i, draft in enumerate(drafts) if chosen[i] != draft), len(drafts))


def _largest(logits: Tensor, trials: Sequence[Trial]) -> Sequence[Tensor]:
    """The first of the largest of each row, after the penalty."""
    scores = penalised(logits, trials)
    tokens = choose_greedy(scores) if library.runs_on(logits.device.type) else scores.argmax(-1)
    rows: Sequence[Tensor] = tokens.split_with_sizes([trial.num_rows for trial in trials])
    return rows


def _drawn(logits: Tensor, trials: Sequence[Trial]) -> Sequence[Tensor]:
    """Where each position's own uniform number falls in its distribution."""
    scores, masses = candidates(logits, trials)
    num_rows = [trial.num_rows for trial in trials]
    is_dear = any(trial.sampling.top_p < 1.0 for trial in trials)
    if is_dear and is_read_for_nothing(logits.device):
        own = zip(
            trials,
            scores.split_with_sizes(num_rows),
            masses.split_with_sizes(num_rows),
            strict=True,
        )
        return [_drawn_in_turn(*part) for part in own]
    params = [trial.sampling for trial in trials for _ in range(trial.num_rows)]
    numbers = [trial.uniform(row) for trial in trials for row in range(trial.num_rows)]
    tokens = _at(numbers, nucleus(scores, masses, params))
    rows: Sequence[Tensor] = tokens.split_with_sizes(num_rows)
    return rows


def _drawn_in_turn(trial: Trial, scores: Tensor, masses: Tensor) -> Tensor:
    """The same up to the first row that does not choose its draft: no nucleus is made, which is dear, of a row that cannot count."""
    chosen: list[int] = []
    for row, draft in enumerate([*trial.drafts, None]):
        own = slice(row, row + 1)
        kept = nucleus(scores[own], masses[own], [trial.sampling])
        chosen.append(int(_at([trial.uniform(row)], kept)))
        if chosen[-1] != draft:
            break
    return torch.tensor(chosen)


def _at(numbers: Sequence[float], masses: Tensor) -> Tensor:
    """The token [T] int64 at each row's uniform number of its masses [T, V]."""
    uniforms = torch.tensor(numbers, dtype=torch.float64).to(masses.device, non_blocking=True)
    if library.runs_on(masses.device.type):
        return choose_sampled(masses, uniforms)
    return drawn(masses, uniforms)
