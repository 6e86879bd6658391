"""The native tables of one sequence: prompt look-up against a brute-force search, and probabilities by the bins."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ladder.proposers import Match
from shared.ladder.table_confidence import SIZES, TableConfidence, lookup_bins
from tests.native_tables import probability_of, tables_of

MAX_MATCH, MAX_OCCURRENCES = 8, 16
TOKENS = st.lists(st.integers(0, 3), max_size=90)


def brute_force(tokens: list[int], drafted: list[int]) -> Match | None:
    context = tokens[-MAX_MATCH:] + drafted
    for length in range(min(MAX_MATCH, len(context)), 0, -1):
        wanted = context[-length:]
        followers = [tokens[end] for end in range(length, len(tokens)) if tokens[end - length : end] == wanted][
            -MAX_OCCURRENCES:
        ]
        if followers:
            best = max(set(followers), key=lambda t: (followers.count(t), len(followers) - followers[::-1].index(t)))
            count = followers.count(best)
            return Match(best, length, count, count / len(followers))
    return None


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 3), max_size=6))
def test_prompt_look_up_equals_brute_force(tokens: list[int], drafted: list[int]) -> None:
    assert tables_of(tokens).matches(drafted) == (brute_force(tokens, drafted), [], [])


def test_prompt_look_up_equals_brute_force_in_a_long_text_that_loops() -> None:
    tokens = [number * number % 37 % 11 for number in range(3000)]
    tables = tables_of([])
    for start in range(0, 3000, 250):
        tables.append(tokens[start : start + 250])
        for drafted in ([], [3], [1, 4]):
            assert tables.matches(drafted)[0] == brute_force(tokens[: start + 250], drafted)


def test_drafts_extend_the_context_but_are_not_indexed() -> None:
    tables = tables_of([1, 2, 3, 4, 1])
    found = [tables.matches(drafted)[0] for drafted in ((), (2,), (2, 3), (9,), (9, 9))]
    assert found == [Match(2, 1, 1, 1.0), Match(3, 2, 1, 1.0), Match(4, 3, 1, 1.0), None, None]


def test_the_latest_of_equals_wins() -> None:
    match = tables_of([5, 1, 5, 2, 5]).matches()[0]
    assert match == Match(2, 1, 1, 0.5)


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 3), max_size=6), st.randoms(use_true_random=False))
def test_a_probability_is_that_of_the_matchs_bins(tokens: list[int], drafted: list[int], draw) -> None:  # type: ignore[no-untyped-def]
    confidence = TableConfidence(draw.uniform(-2, 2), [[draw.uniform(-3, 3) for _ in range(n)] for n in SIZES])
    tables = tables_of(tokens, confidence)
    match = tables.matches(drafted)[0]
    if match is None:
        assert tables.propose(drafted) == []
    else:
        [draft] = tables.propose(drafted)
        assert draft.token == match.token
        expected = probability_of(confidence, lookup_bins(match, [], len(drafted)))
        assert draft.probability == pytest.approx(expected, rel=1e-12)
        assert math.isfinite(draft.probability)
