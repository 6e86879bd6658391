"""The confidence of prompt look-up and n-gram table: a calibrated, monotone probability for each of their drafts."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.errors import Corrupt
from shared.ladder.proposers import Match

# Lower edges of the bins: a value belongs to the last bin whose edge it reaches.
COUNT_EDGES = (1, 2, 3, 4, 6, 10, 20, 60)
SHARE_EDGES = (0.0, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95, 0.995)
NUM_LENGTHS = 8
NUM_CHAINED = 5
# What another table proposes: nothing, another token, or the same token.
SILENT, DIFFERS, AGREES = 0, 1, 2
SIZES = (NUM_LENGTHS, len(COUNT_EDGES), len(SHARE_EDGES), NUM_CHAINED, 3)
# Per feature: whether a higher bin never lowers the probability. True for match length, count and share.
MONOTONE = (True, True, True, False, False)
RIDGE = 1e-3
FIT_STEPS = 60


Bins = tuple[int, int, int, int, int]


def _bin(value: float, edges: Sequence[float]) -> int:
    index = 0
    while index + 1 < len(edges) and value >= edges[index + 1]:
        index += 1
    return index


_COUNT_BINS = [_bin(count, COUNT_EDGES) for count in range(COUNT_EDGES[-1] + 1)]
_SHARE_BINS = [*(_bin((step + 0.5) / 256, SHARE_EDGES) for step in range(255)), len(SHARE_EDGES) - 1]


def bins_of(match: Match, second_opinion: Match | None, num_chained: int) -> Bins:
    """The bin of each feature of a draft: the match's length, count and share, the number of drafts before it in the
    chain, and whether another table's match is SILENT, DIFFERS or AGREES."""
    opinion = SILENT if second_opinion is None else AGREES if second_opinion.token == match.token else DIFFERS
    return (
        min(match.length, NUM_LENGTHS) - 1,
        _COUNT_BINS[min(match.count, COUNT_EDGES[-1])],
        _SHARE_BINS[round(match.share * 255)],
        min(num_chained, NUM_CHAINED - 1),
        opinion,
    )


def lookup_bins(match: Match, ngrams: Sequence[Match], num_chained: int) -> Bins:
    """As `bins_of`, of a look-up's match. Its second opinion is the n-gram table's match of the longest context, the
    first of `ngrams`."""
    return bins_of(match, ngrams[0] if ngrams else None, num_chained)


class TableConfidence:
    """Logistic regression over binned features: the sigmoid of a bias and one weight per feature is the probability
    that a draft is the full model's greedy choice, given that the drafts chained before it are right. See
    csrc/draft/tables.h."""

    def __init__(self, bias: float, weights: Sequence[Sequence[float]]) -> None:
        self.bias = bias
        self.weights = [list(row) for row in weights]

    def to_json(self) -> dict[str, Any]:
        return {"bias": self.bias, "weights": self.weights}

    @classmethod
    def from_json(cls, data: Any) -> "TableConfidence":
        """Raises `Corrupt` unless `data` has the form that `to_json` returns."""
        try:
            bias, weights = (float(data["bias"]), [[float(w) for w in row] for row in data["weights"]])
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise Corrupt("a table's bias or weights are missing or not numbers") from error
        numbers = [bias, *(weight for row in weights for weight in row)]
        if tuple(map(len, weights)) != SIZES or not all(abs(number) < 50 for number in numbers):
            raise Corrupt("a table's confidence has the wrong size or weights out of range")
        return cls(bias, weights)


def fit_table_confidence(evidence: Sequence[Bins], agreed: Sequence[bool]) -> TableConfidence:
    """Fits it by ridge logistic regression over the bins, with L-BFGS.

    `agreed[i]`: whether the full model's greedy choice was the draft with the features `evidence[i]`. In monotone
    features the weight grows from bin to bin by a softplus, which is never negative. Deterministic. Drafts in the same
    bins are merged into one weighted row.
    """
    blank = TableConfidence(0.0, [[0.0] * size for size in SIZES])
    grouped: dict[Bins, list[int]] = {}
    for item, label in zip(evidence, agreed, strict=True):
        cell = grouped.setdefault(item, [0, 0])
        cell[0] += 1
        cell[1] += int(label)
    if not grouped:
        # Without any evidence every draft gets a probability of 0.1.
        return TableConfidence(-math.log(9.0), blank.weights)
    cells = torch.tensor(list(grouped), dtype=torch.long)
    weight, hits = torch.tensor(list(grouped.values()), dtype=torch.float64).unbind(1)
    overall = float(((hits.sum() + 0.5) / (weight.sum() + 1.0)).clamp(0.01, 0.99))
    bias = torch.full((1,), math.log(overall / (1 - overall)), dtype=torch.float64)
    raw = [
        torch.full((size,), -2.0 if m else 0.0, dtype=torch.float64) for size, m in zip(SIZES, MONOTONE, strict=True)
    ]
    parameters = [bias.requires_grad_(), *(row.requires_grad_() for row in raw)]
    optimiser = torch.optim.LBFGS(parameters, max_iter=FIT_STEPS, line_search_fn="strong_wolfe")

    def effects() -> list[Tensor]:
        # Weights are relative to the first bin, whose weight is 0.
        return [
            torch.nn.functional.softplus(row[1:]).cumsum(0) if m else row[1:]
            for row, m in zip(parameters[1:], MONOTONE, strict=True)
        ]

    def closure() -> Tensor:
        optimiser.zero_grad()
        full = [torch.cat([row.new_zeros(1), row]) for row in effects()]
        score = parameters[0] + sum(row[cells[:, i]] for i, row in enumerate(full))
        softplus = torch.nn.functional.softplus(score)
        loss = (weight * softplus - hits * score).sum() + RIDGE * weight.sum().sqrt() * sum(
            (row**2).sum() for row in full
        )
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    with torch.no_grad():
        rows = [[0.0, *row.clamp(-40, 40).tolist()] for row in effects()]
        bias_value = float(parameters[0].detach().clamp(-40, 40))
    return TableConfidence(bias_value, rows)
