"""The n-gram table: back-off, counts, pruning, hashing, storage."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from calibrator_service.calibration.states.ngram_builder import NgramTableBuilder
from shared.errors import Corrupt
from shared.ladder.ngram_table import MAX_ORDER, NgramTable
from shared.ladder.proposers import Match
from tests.native_tables import tables_of

LARGE = 1 << 20


def learnt(*rows: list[int], max_bytes: int = LARGE, **options: int) -> NgramTable:
    builder = NgramTableBuilder(**options)
    for row in rows:
        tokens = np.array(row)
        builder.add(tokens[:-1], tokens[1:])
    return builder.build(max_bytes)


def matches(table: NgramTable, tail: Sequence[int]) -> list[Match]:
    return tables_of(tail, None, table).matches()[1]


def proposed(table: NgramTable, tail: Sequence[int]) -> Match | None:
    """The match of the longest known context."""
    return next(iter(matches(table, tail)), None)


def test_backs_off_to_shorter_contexts():
    # 7 is followed by 1 mostly, but after (3, 7) by 2, seen twice.
    table = learnt([0, 7, 1], [5, 7, 1], [6, 7, 1], [3, 7, 2], [3, 7, 2])
    assert proposed(table, [9, 7]) == Match(1, 1, 3, 153 / 255)
    assert proposed(table, [3, 7]) == Match(2, 2, 2, 1.0)
    assert [m.length for m in matches(table, [3, 7])] == [2, 1]
    assert proposed(table, [3, 8]) is None
    assert proposed(table, []) is None


def test_longest_context_is_max_order():
    row = [1, 2, 3, 4, 5, 6]
    other = [9, 9, 3, 4, 5, 7]
    table = learnt(row, row, other, other, other)
    match = proposed(table, [1, 2, 3, 4, 5])
    assert match == Match(6, MAX_ORDER, 2, 1.0)
    assert proposed(table, [0, 0, 3, 4, 5]) == Match(7, 1, 3, 153 / 255)


def test_positions_before_first_are_context_only():
    builder = NgramTableBuilder()
    builder.add(np.array([1, 2, 3]), np.array([0, 0, 4]), first=2)
    table = builder.build(LARGE)
    assert proposed(table, [1]) is None
    assert proposed(table, [3]) is not None


def test_the_models_choice_is_counted_and_not_the_next_token():
    builder = NgramTableBuilder()
    builder.add(np.array([1, 2, 1, 2]), np.array([8, 9, 8, 9]))
    table = builder.build(LARGE)
    match = proposed(table, [1])
    assert match is not None
    assert match.token == 8


def test_the_tables_size_is_bounded_and_frequent_entries_are_kept():
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 5000, 200).tolist() for _ in range(20)]
    frequent = [[11, 12, 13]] * 30
    table = learnt(*rows, *frequent, max_bytes=8 * 100)
    assert 0 < table.num_entries <= 100
    assert sum(t.nbytes for t in table.to_tensors().values()) <= 1000
    match = proposed(table, [11])
    assert match is not None
    assert match.token == 12


def test_counting_memory_is_bounded():
    builder = NgramTableBuilder(capacity=50)
    for _ in range(40):
        builder.add(np.array([1, 2]), np.array([2, 3]))
    builder.add(np.arange(10, 1000), np.arange(11, 1001))
    table = builder.build(LARGE)
    assert 0 < table.num_entries <= 50 * MAX_ORDER
    match = proposed(table, [1])
    assert match is not None
    assert (match.token, match.count) == (2, 40)


@pytest.mark.parametrize("highest", [60_000, 200_000])
def test_storage_round_trip(highest):
    row = np.random.default_rng(0).integers(0, highest, 500).tolist()
    table = learnt([*row, highest - 1, highest - 1, highest - 1])
    read = NgramTable.from_tensors(table.to_tensors(), highest)
    assert read.num_entries == table.num_entries > 400
    for end in range(1, len(row)):
        tail = row[max(0, end - 4) : end]
        assert matches(read, tail) == matches(table, tail)


def test_invalid_storage_is_refused():
    tensors = learnt([0, 7, 1], [5, 7, 1], [6, 7, 1], [3, 7, 2], [3, 7, 2]).to_tensors()
    for name, damaged in {
        "1.keys": tensors["1.keys"].flip(0),
        "1.tokens": tensors["1.tokens"][:-1],
        "1.counts": tensors["1.counts"].float(),
        "2.counts": torch.zeros_like(tensors["2.counts"]),
    }.items():
        with pytest.raises(Corrupt):
            NgramTable.from_tensors({**tensors, name: damaged}, 10)
    with pytest.raises(Corrupt):
        NgramTable.from_tensors(tensors, 2)
    with pytest.raises(Corrupt):
        NgramTable.from_tensors({k: v for k, v in tensors.items() if k != "4.keys"}, 10)


def builder_of(*rows: list[int]) -> NgramTableBuilder:
    builder = NgramTableBuilder()
    for row in rows:
        tokens = np.array(row)
        builder.add(tokens[:-1], tokens[1:])
    return builder


def stored(builder: NgramTableBuilder) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in builder.to_tensors().items()}


def test_stored_counts_of_two_texts_add_to_those_of_both():
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, 20, 200).tolist() for _ in range(6)]
    parent = NgramTableBuilder.from_tensors(builder_of(*rows[:4]).to_tensors(), 20)
    total = NgramTableBuilder()
    total.add_counts(parent)
    total.add_counts(builder_of(*rows[4:]))
    assert stored(total) == stored(builder_of(*rows))
    assert total.build(LARGE).to_tensors().keys() == builder_of(*rows).build(LARGE).to_tensors().keys()
    for name, tensor in builder_of(*rows).build(LARGE).to_tensors().items():
        assert torch.equal(total.build(LARGE).to_tensors()[name], tensor)
    assert stored(parent) == stored(builder_of(*rows[:4])), "the parent itself has not changed"


def test_a_share_lets_old_counts_count_less():
    total = builder_of(*[[3, 5]] * 2)
    total.add_counts(builder_of(*[[3, 4]] * 3), share=0.5)
    match = proposed(total.build(LARGE), [3])
    assert match is not None
    assert match.token == 5
    assert stored(total)["1.counts"] == [1.5, 2.0]
    # What was seen once stays in the table.
    alone = NgramTableBuilder()
    alone.add_counts(builder_of([3, 4]), share=0.25)
    assert proposed(alone.build(LARGE), [3]) == Match(4, 1, 1, 1.0)


def test_the_rarest_counts_are_left_out_of_what_is_stored():
    builder = builder_of([1, 2, 3, 4], *[[7, 8]] * 2)
    tensors = builder.to_tensors(max_pairs=2)
    assert tensors["1.counts"].tolist() == [1.0, 2.0] or tensors["1.counts"].tolist() == [2.0, 1.0]
    assert all(len(tensors[f"{order}.counts"]) == 0 for order in range(2, MAX_ORDER + 1))
    NgramTableBuilder.from_tensors(tensors, 9)


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["2.parents"]


def _narrow(tensors: dict[str, torch.Tensor]) -> None:
    tensors["1.counts"] = tensors["1.counts"].float()


def _short(tensors: dict[str, torch.Tensor]) -> None:
    tensors["1.parents"] = tensors["1.parents"][1:]


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["1.counts"][0] = float("nan")


def _negative(tensors: dict[str, torch.Tensor]) -> None:
    tensors["1.counts"][0] = -1.0


def _disordered(tensors: dict[str, torch.Tensor]) -> None:
    tensors["1.pairs"] = tensors["1.pairs"].flip(0)


def _foreign_token(tensors: dict[str, torch.Tensor]) -> None:
    tensors["1.pairs"][0] |= 0xFFFFFF


@pytest.mark.parametrize("damage", [_without, _narrow, _short, _nan, _negative, _disordered, _foreign_token])
def test_damaged_counts_are_refused(damage):
    tensors = builder_of([1, 2, 3, 4, 1, 3]).to_tensors()
    damage(tensors)
    with pytest.raises(Corrupt):
        NgramTableBuilder.from_tensors(tensors, 9)
