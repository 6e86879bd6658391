"""Which drafts the full model confirms."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from inference_service.engine.request.logprobs import Logprobs, logprobs, unpacked
from shared.model.choosing import choose, num_confirmed
from shared.model.distribution import reads_without_sync
from shared.model.sampling import Trial


@dataclass(frozen=True)
class Verdict:
    """`tokens`: the drafts that were confirmed, and what the full model chooses after them. `logprobs`: theirs, if wanted."""

    tokens: list[int]
    logprobs: list[Logprobs] | None = None


def verify(
    logits: Tensor, trials: Sequence[Trial], num_alternatives: Sequence[int | None] = ()
) -> list[Verdict]:
    """What becomes of each trial. logits [T, V] float32: their rows, in turn.

    `num_alternatives` per trial: None, or left out altogether, is no log-probabilities. The host waits for the device once,
    whatever is asked.
    """
    wanted = num_alternatives or [None] * len(trials)
    choices, scores = computed(logits, trials, wanted)
    parts = [part.flatten() for part in (*choices, *scores)]
    numbers = iter((parts[0] if len(parts) == 1 else torch.cat(parts)).tolist())
    chosen = [[int(number) for number in islice(numbers, len(own))] for own in choices]
    found = [[unpacked(list(islice(numbers, len(row)))) for row in own] for own in scores]
    verdicts = []
    for index, (trial, tokens) in enumerate(zip(trials, chosen, strict=True)):
        num_tokens = 1 + num_confirmed(tokens, trial.drafts)
        own = None if wanted[index] is None else found[index][:num_tokens]
        verdicts.append(Verdict(tokens[:num_tokens], own))
    return verdicts


def computed(
    logits: Tensor, trials: Sequence[Trial], num_alternatives: Sequence[int | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Per trial its choices [n] int64 and their log-probabilities [n, 1 + 2 * alternatives], [0, 1] where it wants none; of none
    where nobody does.

    What `verify` reads, on the logits' device; nothing waits for that.
    """
    choices = choose(logits, trials)
    if reads_without_sync(logits.device):  # so nothing is computed of rows that do not count
        choices = [
            tokens[: 1 + num_confirmed(tokens.tolist(), trial.drafts)]
            for tokens, trial in zip(choices, trials, strict=True)
        ]
    if all(count is None for count in num_alternatives):
        return choices, []
    rows = logits.split_with_sizes([trial.num_rows for trial in trials])
    scores = [
        tokens.new_empty(0, 1) if count is None else logprobs(own[: len(tokens)], tokens, count)
        for own, tokens, count in zip(rows, choices, num_alternatives, strict=True)
    ]
    return choices, scores
