"""What the full model chooses at each row of logits: the verification of drafts, on the device.

Verifying a draft is choosing as the full model would and comparing: see `shared.model.sampling`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.model.distribution import drawn, is_read_for_nothing, masses, penalised
from shared.model.sampling import Trial, uniform_at
from shared.ops import library
from shared.ops.batches import verify_greedy, verify_sampled

NOTHING = -1


def choose(logits: Tensor, trials: Sequence[Trial]) -> list[Tensor]:
    """Per trial the tokens chosen at its rows [n] int64. logits [T, V], float: the trials' rows, in turn.

    A row counts only if all before it chose their drafts; where reading is free, those behind the first that did not are missing.
    One launch for all greedy trials and one for all others; nothing waits for the device.
    """
    rows = logits.split([trial.num_rows for trial in trials])
    greedy = [index for index, trial in enumerate(trials) if trial.sampling.is_greedy]
    sampled = [index for index, trial in enumerate(trials) if not trial.sampling.is_greedy]
    chosen: dict[int, Tensor] = {}
    if is_read_for_nothing(logits.device):
        chosen |= {index: _row_by_row(rows[index], trials[index]) for index in sampled}
        sampled = []
    for members, choices in ((greedy, _largest), (sampled, _drawn)):
        if members:
            own = [trials[index] for index in members]
            group = logits if len(own) == len(trials) else torch.cat([rows[i] for i in members])
            tokens = choices(group, own).split([trial.num_rows for trial in own])
            chosen |= dict(zip(members, tokens, strict=True))
    return [chosen[index] for index in range(len(trials))]


def num_confirmed(chosen: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of the drafts were chosen before the first that was not."""
    return next((i for i, draft in enumerate(drafts) if chosen[i] != draft), len(drafts))


def _row_by_row(logits: Tensor, trial: Trial) -> Tensor:
    """What `_drawn` gives for one trial [n, V], up to the first row that did not choose its draft."""
    chosen: list[int] = []
    for row, draft in zip(logits.split(1), [*trial.drafts, NOTHING], strict=True):
        alone = Trial(trial.sampling, [*trial.context, *trial.drafts[: len(chosen)]])
        chosen.append(int(_drawn(row, [alone])))
        if chosen[-1] != draft:
            break
    return torch.tensor(chosen)


def _largest(logits: Tensor, trials: Sequence[Trial]) -> Tensor:
    """[T, V] -> [T] int64: the first of the largest, after the penalty."""
    scores = penalised(logits, trials)
    if not library.runs_on(logits.device.type):
        return scores.argmax(-1)
    return verify_greedy(scores, *_single_rows(scores))[0]


def _drawn(logits: Tensor, trials: Sequence[Trial]) -> Tensor:
    """[T, V] -> [T] int64: where each position's own uniform number falls in its distribution."""
    found = masses(logits, trials)
    numbers = [
        uniform_at(trial.sampling.seed, len(trial.context) + row)
        for trial in trials
        for row in range(trial.num_rows)
    ]
    uniforms = torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True)
    if not library.runs_on(logits.device.type):
        return drawn(found, uniforms)
    return verify_sampled(found, *_single_rows(found), uniforms)[0]


def _single_rows(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts and starts, as the ops take them, of rows that test nothing: what was right is counted where the answer is read."""
    drafts = torch.full((len(scores),), NOTHING, device=scores.device)
    return drafts, torch.arange(len(scores) + 1, device=scores.device)
