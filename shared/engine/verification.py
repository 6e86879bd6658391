"""Verifies drafts: which of them the full model accepts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from shared.engine.request.logprobs import Logprobs, logprobs, logprobs_from_row
from shared.model.choosing import choose, num_accepted, relaxed
from shared.model.distribution import reads_without_sync
from shared.model.sampling import Trial
from shared.ops import NO_TOKEN


@dataclass(frozen=True)
class Verdict:
    """`tokens`: the accepted drafts and the token that the full model chooses after them, NO_TOKEN if it has none.
    `logprobs`: of these tokens, if asked for. `relaxed`: the places of the drafts that were accepted although the full
    model chose another token.
    """

    tokens: list[int]
    logprobs: list[Logprobs] | None = None
    relaxed: Sequence[int] = ()

    @property
    def is_sound(self) -> bool:
        """Whether the model has chosen a last token. It does not where its logits are not finite."""
        return self.tokens[-1] != NO_TOKEN

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


def verify(logits: Tensor, trials: Sequence[Trial], num_alternatives: Sequence[int | None] = ()) -> list[Verdict]:
    """The verdict on each trial. logits [T, V] float32: the rows of all trials, trial after trial.

    `num_alternatives` has one entry per trial; None means no log-probabilities. If it is empty, no trial gets any. The
    host waits for the device once.
    """
    num_logprobs = num_alternatives or [None] * len(trials)
    choices, scores, others = compute_choices(logits, trials, num_logprobs)
    parts = [*choices, *others, *(rows.flatten() for rows in scores)]
    numbers = iter((parts[0] if len(parts) == 1 else torch.cat(parts)).tolist())
    chosen = [[int(number) for number in islice(numbers, len(part))] for part in choices]
    replaced = [list(islice(numbers, len(part))) for part in others] or [[]] * len(trials)
    token_logprobs = [[logprobs_from_row(list(islice(numbers, len(row)))) for row in rows] for rows in scores]
    verdicts = []
    for index, (trial, tokens) in enumerate(zip(trials, chosen, strict=True)):
        num_tokens = 1 + num_accepted(tokens, trial.drafts)
        verdict_logprobs = None if num_logprobs[index] is None else token_logprobs[index][:num_tokens]
        places = [place for place, is_other in enumerate(replaced[index][:num_tokens]) if is_other]
        verdicts.append(Verdict(tokens[:num_tokens], verdict_logprobs, places))
    return verdicts


def compute_choices(
    logits: Tensor, trials: Sequence[Trial], num_alternatives: Sequence[int | None]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Per trial its choices [n] int64, its log-probabilities [n, 1 + 2 * alternatives], [0, 1] if it asks for none, and
    which choices are drafts in place of others [n] bool. The second list is empty if no trial asks for any, the third
    if none is relaxed.

    The tensors are on the logits' device. `verify` reads them; this function does not wait for the device, except on
    devices that are read without a synchronisation.
    """
    choices = exact_choices = choose(logits, trials)
    others = []
    if any(trial.is_relaxed for trial in trials):
        # Choices and drafts are allowed, so a constraint changes none of their logits.
        choices = relaxed(logits, trials, exact_choices)
        others = [accepted != exact for accepted, exact in zip(choices, exact_choices, strict=True)]
    if all(count is None for count in num_alternatives):
        return choices, [], others
    if reads_without_sync(logits.device):  # so nothing is computed of rows that do not count
        choices = [
            tokens[: 1 + num_accepted(tokens.tolist(), trial.drafts)]
            for tokens, trial in zip(choices, trials, strict=True)
        ]
    rows = logits.split_with_sizes([trial.num_rows for trial in trials])
    scores = [
        tokens.new_empty(0, 1) if count is None else logprobs(row_logits[: len(tokens)], tokens, count)
        for row_logits, tokens, count in zip(rows, choices, num_alternatives, strict=True)
    ]
    return choices, scores, others
