"""What drafts are worth: given what all proposers say, and corrected by what was verified."""

import random
from itertools import pairwise

import pytest

from shared.ladder.confidence import Confidence
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.proposers import Draft, exit_name

EXIT = exit_name(0)
MOST = 0.999


def new_confidence() -> Confidence:
    return Confidence(DEFAULT_WEIGHTS, (EXIT,))


def draft(token: int, probability: float, proposer: str = "prompt-lookup") -> Draft:
    return Draft(token, probability, proposer, 0)


def probabilities(confidence: Confidence, *drafts: Draft) -> dict[int, float]:
    return {one.token: probability for one, _, _, probability in confidence.rate(drafts)}


def test_the_surest_table_alone_is_believed() -> None:
    rated = new_confidence().rate([draft(7, 0.4), draft(8, 0.6, "ngram-table"), draft(7, 0.5, "ngram-table")])
    assert [(one.token, one.proposer, probability) for one, _, _, probability in rated] == [(8, "ngram-table", 0.6)]
    assert new_confidence().rate([]) == []


def test_agreement_raises_and_disagreement_lowers_what_is_said() -> None:
    said = (0.3, 0.5, 0.8)
    for table in said:
        for head in said:
            [both] = probabilities(new_confidence(), draft(7, table), draft(7, head, EXIT)).values()
            apart = probabilities(new_confidence(), draft(7, table), draft(8, head, EXIT))
            assert both > apart[7]
            assert apart[7] < table
            assert apart[8] < head
            assert apart[7] + apart[8] < 1.0
    # The two figures that were measured: half right each, where they differ a table is right far more often.
    apart = probabilities(new_confidence(), draft(7, 0.5), draft(8, 0.5, EXIT))
    assert apart[7] == pytest.approx(0.378, abs=0.001)
    assert apart[8] == pytest.approx(0.175, abs=0.001)


def test_who_says_more_is_believed_more() -> None:
    for head in (0.2, 0.6):
        rising = [
            probabilities(new_confidence(), draft(7, table), draft(8, head, EXIT))
            for table in (0.1, 0.3, 0.5, 0.7, 0.9)
        ]
        assert all(low[7] < high[7] and low[8] > high[8] for low, high in pairwise(rising))


def test_an_exit_alone_is_right_less_often_than_it_says() -> None:
    [alone] = probabilities(new_confidence(), draft(8, 0.5, EXIT)).values()
    assert alone == pytest.approx(0.198, abs=0.001)


@pytest.mark.parametrize("share", [0.05, 0.4, 0.9])
def test_what_is_really_right_is_learnt_apart_for_each_case(share: float) -> None:
    draw, confidence = random.Random(1), new_confidence()
    apart = [draft(7, 0.5), draft(8, 0.5, EXIT)]
    before = probabilities(confidence, draft(7, 0.5), draft(7, 0.5, EXIT))
    for _ in range(4000):
        confidence.record([apart], [8 if draw.random() < share else 9])
    found = probabilities(confidence, *apart)
    assert found[8] == pytest.approx(share, abs=0.04)
    assert found[7] < 0.02, "a draft that was not chosen is learnt from, too"
    assert probabilities(confidence, draft(7, 0.5), draft(7, 0.5, EXIT)) == before
    assert probabilities(confidence, draft(7, 0.5)) == {7: 0.5}


def test_what_is_said_too_high_and_too_low_is_corrected_at_once() -> None:
    """One factor for both would be wrong at each."""
    draw, confidence = random.Random(1), new_confidence()
    shares = {0.2: 0.35, 0.95: 0.6}
    for _ in range(2000):
        said = draw.choice([*shares])
        confidence.record([[draft(7, said)]], [7 if draw.random() < shares[said] else 8])
    for said, share in shares.items():
        assert probabilities(confidence, draft(7, said))[7] == pytest.approx(share, abs=0.08)
    for surer, sure in ((0.999, 0.96), (0.001, 0.04)):
        assert probabilities(confidence, draft(7, surer)) == probabilities(confidence, draft(7, sure))


def test_another_kind_of_text_is_learnt_in_a_hundred_drafts() -> None:
    confidence = new_confidence()
    for _ in range(4000):
        confidence.record([[draft(7, 0.8)]], [7])
    assert probabilities(confidence, draft(7, 0.8))[7] > 0.99
    for _ in range(100):
        confidence.record([[draft(7, 0.8)]], [8])
    assert probabilities(confidence, draft(7, 0.8))[7] < 0.5


def test_no_draft_is_certain() -> None:
    confidence = new_confidence()
    for _ in range(2000):
        confidence.record([[draft(7, 0.5)]], [7])
    assert probabilities(confidence, draft(7, 0.999)) == {7: MOST}
    for extreme in (1e-9, 1.0):
        assert all(0.0 < p < 1.0 for p in probabilities(confidence, draft(7, extreme), draft(8, 1.0, EXIT)).values())


def test_an_exits_chains_end_by_how_often_it_is_right_at_all() -> None:
    confidence = new_confidence()
    assert confidence.factor(EXIT) == 1.0
    for _ in range(500):
        confidence.record([[draft(7, 0.9), draft(8, 0.8, EXIT)]], [7])
    assert confidence.factor(EXIT) < 0.1
    for _ in range(4000):
        confidence.record([[draft(7, 0.9), draft(8, 0.8, EXIT)]], [8])
    assert confidence.factor(EXIT) > 1.1, "the old sums have faded"


def test_a_table_is_preferred_that_was_right_more_often_than_it_said() -> None:
    confidence = new_confidence()
    said = [draft(8, 0.6), draft(9, 0.5, "ngram-table")]
    assert [one.token for one, *_ in confidence.rate(said)] == [8]
    for _ in range(100):
        confidence.record([said[:1]], [7])
    assert [one.token for one, *_ in confidence.rate(said)] == [9]
