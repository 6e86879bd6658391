"""The table that learns from answers: counts, clients apart, bounded memory."""

from collections.abc import Sequence

import pytest

from shared.errors import InvalidInput
from shared.ladder.learned_ngrams import ENTRY_BYTES, SET_ENTRIES, ClientNgrams, LearnedNgrams
from shared.ladder.ngram_table import MAX_ORDER
from shared.ladder.proposers import Match
from tests.native_tables import tables_of

ONE_SET = SET_ENTRIES * ENTRY_BYTES


def found(mine: ClientNgrams, tail: Sequence[int]) -> list[Match]:
    return tables_of(tail, learned=mine).matches()[2]


def test_the_most_frequent_token_of_each_context_the_longest_context_first() -> None:
    mine = LearnedNgrams(1 << 16).of("ann")
    for first, token in ((5, 1), (5, 1), (6, 2), (5, 3), (6, 1)):
        mine.learn([first, 7, token], 2)
    assert found(mine, [5, 7]) == [Match(1, 2, 2, 2 / 3), Match(1, 1, 3, 3 / 5)]
    assert found(mine, [9, 7]) == [Match(1, 1, 3, 3 / 5)]
    assert found(mine, [7, 9]) == found(mine, []) == []
    mine.learn([*range(10), 4], 10)
    assert [match.length for match in found(mine, range(10))] == list(range(MAX_ORDER, 0, -1))


def test_earlier_tokens_are_context_only() -> None:
    mine = LearnedNgrams(1 << 16).of("ann")
    mine.learn([1, 2, 3, 4], 2)
    assert not found(mine, [1])
    assert [match.length for match in found(mine, [1, 2])] == [2, 1]
    assert [match.token for match in found(mine, [1, 2, 3])] == [4, 4, 4]


def test_a_token_that_follows_more_often_takes_the_place_of_the_first() -> None:
    mine = LearnedNgrams(1 << 16).of("ann")
    for token in (1, 2, 2, 3, 3, 3):
        mine.learn([7, token], 1)
    # 3 took the place of 1, which had the lower count, so it was counted from its second time on.
    assert found(mine, [7]) == [Match(3, 1, 3, 3 / 6)]


def test_no_client_finds_what_another_one_taught() -> None:
    table = LearnedNgrams(1 << 16)
    table.of("ann").learn([1, 2, 3], 2)
    assert found(table.of("ann"), [1, 2])
    assert found(table.of("bob"), [1, 2]) == found(table.of(""), [1, 2]) == []
    assert found(table.of("ann", pool="legal"), [1, 2]) == []
    assert not found(LearnedNgrams(1 << 16).of("ann"), [1, 2])


def test_new_contexts_replace_the_least_frequent_ones() -> None:
    table = LearnedNgrams(ONE_SET)
    mine = table.of("ann")
    for _ in range(2):
        mine.learn([0, 1], 1)
    for context in range(1, 50):
        mine.learn([context, 1], 1)
    assert table.num_entries == SET_ENTRIES
    assert found(mine, [0]) == [Match(1, 1, 2, 1.0)]
    assert found(mine, [49])
    assert not found(mine, [40])


def test_counts_stay_small_and_go_on_learning() -> None:
    mine = LearnedNgrams(1 << 16).of("ann")
    for _ in range(1000):
        mine.learn([7, 1], 1)
    [before] = found(mine, [7])
    assert before.token == 1
    assert before.count <= 255
    assert before.share == 1.0
    for _ in range(300):
        mine.learn([7, 2], 1)
    [after] = found(mine, [7])
    assert after.token == 2
    assert 0.5 < after.share < 1.0


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(InvalidInput, match="64 bytes"):
        LearnedNgrams(ONE_SET - 1)
