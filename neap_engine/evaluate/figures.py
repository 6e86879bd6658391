"""The figures of each side of an evaluation: quality and speed, summed over all prompts."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np

from neap_engine.evaluate.sides import TimedAnswer
from neap_engine.evaluate.transformers_sides import Score

RESAMPLES = 4000
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# The score of an answer about which the full model is not asked.
UNSCORED = Score((), 0)


@dataclass(frozen=True)
class ScoredAnswer:
    """`is_right`: whether the answer ends with the number that is expected; None if none is."""

    run: TimedAnswer
    score: Score
    is_right: bool | None


@dataclass(frozen=True)
class Row:
    """One side over all prompts.

    `num_identical`: answers that are those of the first side, token by token. `chosen_share`: tokens that are the full
    model's choice after what precedes them. `perplexity`: of the answers under the full model. `num_right` of
    `num_checkable` answers end with the number that is expected; `lost_low` to `lost_high`: 95 % bootstrap interval of
    the share that is right in the first side and not in this one, less the reverse. `speed_up`: the median over prompts
    of the seconds per token of the first side over this one's, half of them from `speed_low` to `speed_high`. `note`:
    why a side has no figures.
    """

    side: str
    note: str = ""
    num_answers: int = 0
    num_identical: int = 0
    chosen_share: float = 0.0
    perplexity: float = 0.0
    num_right: int = 0
    num_checkable: int = 0
    lost_low: float = 0.0
    lost_high: float = 0.0
    tokens_per_s: float = 0.0
    speed_up: float = 0.0
    speed_low: float = 0.0
    speed_high: float = 0.0
    layers_per_token: float = 0.0
    tokens_per_pass: float = 0.0


def row(side: str, answers: Sequence[ScoredAnswer], baseline: Sequence[ScoredAnswer]) -> Row:
    runs, scores = [answer.run for answer in answers], [answer.score for answer in answers]
    nats = [nat for score in scores for nat in score.nats]
    num_decoded, seconds = sum(run.num_decoded for run in runs), sum(run.decode_s for run in runs)
    return Row(
        side,
        "",
        len(answers),
        sum(answer.run.token_ids == other.run.token_ids for answer, other in zip(answers, baseline, strict=True)),
        sum(score.num_chosen for score in scores) / max(len(nats), 1),
        math.exp(sum(nats) / max(len(nats), 1)),
        sum(answer.is_right is True for answer in answers),
        sum(answer.is_right is not None for answer in answers),
        *lost(answers, baseline),
        num_decoded / seconds if seconds else 0.0,
        *speed_up(runs, [answer.run for answer in baseline]),
        sum(run.layer_executions for run in runs) / max(num_decoded, 1),
        num_decoded / max(sum(run.verify_passes for run in runs), 1),
    )


def speed_up(runs: Sequence[TimedAnswer], baseline: Sequence[TimedAnswer]) -> tuple[float, float, float]:
    """Median and quartiles, as in `Row`."""
    pairs = [(other.per_token_s, run.per_token_s) for run, other in zip(runs, baseline, strict=True)]
    ratios = [before / after for before, after in pairs if before and after]
    if not ratios:
        return 0.0, 0.0, 0.0
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return float(median), float(low), float(high)


def lost(answers: Sequence[ScoredAnswer], baseline: Sequence[ScoredAnswer]) -> tuple[float, float]:
    """The interval of `Row`. Prompts are drawn with replacement, each with both of its answers."""
    pairs = zip(answers, baseline, strict=True)
    losses = [float(b.is_right or 0) - a.is_right for a, b in pairs if a.is_right is not None]
    if not losses:
        return 0.0, 0.0
    drawn = np.random.default_rng(0).choice(losses, (RESAMPLES, len(losses)))
    low, high = np.quantile(drawn.mean(1), (0.025, 0.975))
    return float(low), float(high)


def expected_answers(path: Path) -> list[str | None]:
    """The field "answer" of each prompt in a file that `read_prompts` has read."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        return [json.loads(line).get("answer") for line in lines if line.strip()]


def is_right(text: str, expected: str | None) -> bool | None:
    """Whether both texts end with the same number. None if there is nothing to expect."""
    number = None if expected is None else final_number(expected)
    return None if number is None else final_number(text) == number


def final_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
