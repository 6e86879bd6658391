"""The full model's choice of a token at each row of logits, on the device.

A draft is verified by making this choice and comparing: see `shared.model.sampling`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.model import host_choices, host_draws
from shared.model.distribution import candidates, constrained, drawn, nucleus, penalised, reads_without_sync
from shared.model.sampling import Trial
from shared.ops import library
from shared.ops.choices import NO_TOKEN, choose_greedy, choose_sampled


def choose(logits: Tensor, trials: Sequence[Trial]) -> list[Tensor]:
    """The tokens chosen at each trial's rows, of those that its constraint allows: per trial [n] int64. logits [T, V]
    float: the rows of all trials, trial after trial.

    NO_TOKEN where an allowed logit is NaN, or the largest one is infinite. A row counts only if every row before it
    chose its draft, so rows after the first that did not may be missing from the result. All greedy trials take one
    launch, all others another one. Nothing waits for the device.
    """
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


def within_margins(logits: Tensor, trials: Sequence[Trial], choices: list[Tensor]) -> list[Tensor]:
    """`choices`, with each draft in place of a choice that leads it by at most its trial's margin.

    logits and choices as of `choose`. Nothing waits for the device.
    """
    rows = logits.split_with_sizes([trial.num_rows for trial in trials])
    return [
        chosen if trial.margin is None else _within_margin(row_logits, trial.drafts, trial.margin, chosen)
        for row_logits, trial, chosen in zip(rows, trials, choices, strict=True)
    ]


def _within_margin(logits: Tensor, drafts: Sequence[int], margin: float, choices: Tensor) -> Tensor:
    """Row i of logits [n + 1, V] judges draft i of n; the last row judges none.
    Logits differ as log-probabilities do."""
    drafted = torch.tensor(drafts, dtype=torch.int64).to(logits.device, non_blocking=True)
    chosen, last = choices.split([len(drafted), 1])
    scores = logits[:-1].gather(1, torch.stack([chosen.clamp(min=0), drafted], 1))
    is_near = (scores[:, 0] - scores[:, 1] <= margin) & (chosen != NO_TOKEN)
    return torch.cat([torch.where(is_near, drafted, chosen), last])


def num_accepted(chosen: Sequence[int], drafts: Sequence[int]) -> int:
    """The number of drafts before the first one that was not chosen."""
    return next((i for i, draft in enumerate(drafts) if chosen[i] != draft), len(drafts))


def _largest(logits: Tensor, trials: Sequence[Trial]) -> Sequence[Tensor]:
    """The first of the largest allowed scores of each row, after what changes scores."""
    on_host = reads_without_sync(logits.device)
    scores = penalised(logits if on_host else constrained(logits, trials), trials)
    if library.runs_on(logits.device.type):
        tokens = choose_greedy(scores)
    else:
        tokens = scores.argmax(-1)  # of a NaN, if there is one
        top = scores.gather(1, tokens[:, None])[:, 0]
        tokens = torch.where(top.isfinite(), tokens, NO_TOKEN)
    sizes = [trial.num_rows for trial in trials]
    rows: Sequence[Tensor] = [tokens] if len(trials) == 1 else tokens.split_with_sizes(sizes)
    if not on_host or all(trial.allowed is None for trial in trials):
        return rows
    return [
        chosen if trial.allowed is None else host_choices.allowed_only(chosen, row_scores, trial)
        for chosen, row_scores, trial in zip(rows, scores.split(sizes), trials, strict=True)
    ]


def _drawn(logits: Tensor, trials: Sequence[Trial]) -> Sequence[Tensor]:
    """The token at each position's own uniform number in the position's distribution."""
    if reads_without_sync(logits.device):
        return host_draws.draw(logits, trials)
    scores, masses = candidates(constrained(logits, trials), trials)
    params = [trial.sampling for trial in trials for _ in range(trial.num_rows)]
    numbers = [trial.uniform(row) for trial in trials for row in range(trial.num_rows)]
    tokens = _tokens_at(numbers, nucleus(scores, masses, params))
    rows: Sequence[Tensor] = tokens.split_with_sizes([trial.num_rows for trial in trials])
    return rows


def _tokens_at(numbers: Sequence[float], masses: Tensor) -> Tensor:
    """The token [T] int64 of each row at its uniform number. masses [T, V]."""
    uniforms = torch.tensor(numbers, dtype=torch.float64).to(masses.device, non_blocking=True)
    if library.runs_on(masses.device.type):
        return choose_sampled(masses, uniforms)
    return drawn(masses, uniforms)
