"""The confidence of prompt look-up and of the n-gram table: calibrated, monotone, bounded."""

import itertools
import random

import pytest

from shared.errors import Corrupt
from shared.ladder.proposers import Match
from shared.ladder.table_confidence import (
    AGREES,
    COUNT_EDGES,
    DIFFERS,
    SHARE_EDGES,
    SILENT,
    Bins,
    TableConfidence,
    bins_of,
    fit_table_confidence,
)
from tests.native_tables import probability_of

OPINIONS = {SILENT: None, DIFFERS: Match(2, 1, 1, 1.0), AGREES: Match(1, 1, 1, 1.0)}


def features(length: int, count: int, share: float, num_chained: int, opinion: int) -> Bins:
    return bins_of(Match(1, length, count, share), OPINIONS[opinion], num_chained)


def fitted() -> tuple[TableConfidence, list[Bins], list[bool]]:
    """A confidence head fitted on made-up drafts. Longer matches are right more often. Higher counts are right less
    often, which the confidence head's monotone form must not learn."""
    rng = random.Random(0)
    evidence, agreed = [], []
    for _ in range(6000):
        length, count, opinion = rng.randint(1, 8), rng.choice((1, 2, 5, 30)), rng.randint(0, 2)
        chance = 0.08 * length + (0.2 if opinion == AGREES else 0.0) - (0.1 if count > 1 else 0.0)
        evidence.append(features(length, count, rng.random(), rng.randint(0, 6), opinion))
        agreed.append(rng.random() < chance)
    return fit_table_confidence(evidence, agreed), evidence, agreed


def test_probabilities_are_calibrated() -> None:
    confidence, evidence, agreed = fitted()
    for length, other in itertools.product((1, 4, 8), (SILENT, DIFFERS, AGREES)):
        cell = [i for i, e in enumerate(evidence) if (e[0], e[-1]) == (length - 1, other)]
        mean = sum(probability_of(confidence, evidence[i]) for i in cell) / len(cell)
        assert mean == pytest.approx(sum(agreed[i] for i in cell) / len(cell), abs=0.1)


def test_stronger_evidence_never_lowers_the_probability() -> None:
    confidence, _, _ = fitted()
    for length, count, share in itertools.product(range(1, 8), COUNT_EDGES[:-1], SHARE_EDGES[:-1]):
        here = probability_of(confidence, features(length, count, share, 0, SILENT))
        assert probability_of(confidence, features(length + 1, count, share, 0, SILENT)) >= here
        assert probability_of(confidence, features(length, count * 2, share, 0, SILENT)) >= here
        assert (
            probability_of(confidence, features(length, count, share + 0.15 if share < 0.85 else 1.0, 0, SILENT))
            >= here
        )


@pytest.mark.parametrize(
    ("match", "second_opinion", "num_chained", "bins"),
    [
        (Match(7, 1, 1, 0.0), None, 0, (0, 0, 0, 0, SILENT)),
        (Match(7, 3, 5, 0.5), Match(7, 1, 1, 1.0), 2, (2, 3, 2, 2, AGREES)),
        (Match(7, 8, 20, 0.9), Match(8, 1, 1, 1.0), 4, (7, 6, 5, 4, DIFFERS)),
        (Match(7, 99, 10_000, 1.0), Match(8, 1, 1, 1.0), 64, (7, 7, 7, 4, DIFFERS)),
        (Match(7, 2, 2, 254 / 255), None, 1, (1, 1, 6, 1, SILENT)),
    ],
)
def test_the_bins_of_published_weights_stay(match, second_opinion, num_chained, bins) -> None:
    assert bins_of(match, second_opinion, num_chained) == bins
    assert (SILENT, DIFFERS, AGREES) == (0, 1, 2)


def test_probabilities_are_bounded_for_any_training_data() -> None:
    item = features(3, 2, 0.5, 0, SILENT)
    never = fit_table_confidence([item] * 5000, [False] * 5000)
    always = fit_table_confidence([item] * 5000, [True] * 5000)
    assert 0.001 <= probability_of(never, item) < 0.02
    assert 0.98 < probability_of(always, item) <= 0.999
    assert 0.001 <= probability_of(fit_table_confidence([], []), item) <= 0.2
    assert 0 < probability_of(always, features(99, 10_000, 1.0, 64, AGREES)) <= 0.999


def test_storage_round_trip_and_refusal() -> None:
    confidence, evidence, _ = fitted()
    data = confidence.to_json()
    again = TableConfidence.from_json(data)
    assert all(probability_of(again, e) == probability_of(confidence, e) for e in evidence[:100])
    for damaged in (
        {},
        {**data, "bias": "x"},
        {**data, "bias": float("nan")},
        {**data, "weights": data["weights"][:-1]},
        {**data, "weights": [row[:-1] for row in data["weights"]]},
        None,
    ):
        with pytest.raises(Corrupt):
            TableConfidence.from_json(damaged)
