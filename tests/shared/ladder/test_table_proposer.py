"""Prompt look-up against a brute-force search."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ladder.proposers import Match
from shared.ladder.table_proposer import MAX_OCCURRENCES, PromptLookup

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def brute_force(tokens: list[int], drafted: list[int], max_match: int) -> Match | None:
    context = tokens[-max_match:] + drafted
    for length in range(min(max_match, len(context)), 0, -1):
        wanted = context[-length:]
        followers = [tokens[end] for end in range(length, len(tokens)) if tokens[end - length : end] == wanted][
            -MAX_OCCURRENCES:
        ]
        if followers:
            best = max(set(followers), key=lambda t: (followers.count(t), len(followers) - followers[::-1].index(t)))
            count = followers.count(best)
            return Match(best, length, count, count / len(followers))
    return None


@settings(max_examples=300)
@given(TOKENS, st.lists(st.integers(0, 3), max_size=6), st.integers(1, 5))
def test_equals_brute_force(tokens: list[int], drafted: list[int], max_match: int) -> None:
    assert PromptLookup(tokens, max_match=max_match).propose(drafted) == brute_force(tokens, drafted, max_match)


def test_drafts_extend_the_context_but_are_not_indexed() -> None:
    index = PromptLookup([1, 2, 3, 4, 1])
    assert index.propose() == Match(2, 1, 1, 1.0)
    assert index.propose([2]) == Match(3, 2, 1, 1.0)
    assert index.propose([2, 3]) == Match(4, 3, 1, 1.0)
    assert index.propose([9]) is None
    # If drafts were indexed, the 9 drafted above would be found as a context.
    assert index.propose([9, 9]) is None


def test_the_latest_of_equals_wins() -> None:
    index = PromptLookup([5, 1, 5, 2, 5])
    match = index.propose()
    assert match is not None
    assert (match.token, match.count, match.share) == (2, 1, 0.5)
