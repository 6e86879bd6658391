"""Paged attention: the CPU kernel against its reference, over passes drawn by hypothesis."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shared.ops import reference
from shared.ops.paged import paged_attention
from tests.shared.ops.paged_passes import CLOSE, Pass, drawn_pass

DRAWN = settings(max_examples=60)


@DRAWN
@given(
    shape=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 5, 30, 140])), min_size=1, max_size=4),
    padding=st.integers(0, 2),
    heads=st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(1, 3)),
    widths=st.tuples(st.sampled_from([1, 8, 20, 64]), st.sampled_from([1, 8, 20, 64])),
    block_tokens=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(list(CLOSE)),
    transposed=st.booleans(),
    softcap=st.sampled_from([0.0, 2.0]),
    window=st.sampled_from([0, 1, 7, 100]),
    num_branches=st.integers(0, 3),
)  # fmt: skip
def test_paged_attention_agrees_with_its_reference_and_ignores_its_neighbours(
    shape: list[tuple[int, int]],
    padding: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    block_tokens: int,
    dtype: torch.dtype,
    transposed: bool,
    softcap: float,
    window: int,
    num_branches: int,
) -> None:
    counts, lengths = zip(*shape, strict=True)
    made = drawn_pass(
        list(counts),
        list(lengths),
        padding,
        heads,
        widths,
        block_tokens,
        dtype,
        transposed,
        num_branches,
        softcap=softcap,
        window=window,
    )
    own, other = made.copied(), made.copied()
    out = own.run()
    expected = reference.paged_attention(**vars(other))
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, **CLOSE[dtype])
    for pool, same in ((own.keys, other.keys), (own.values, other.values)):
        assert torch.equal(pool.view(torch.uint8), same.view(torch.uint8))
    # Token by token in the order of positions, the bits must be the same. Branches are kept after all others.
    one_by_one = made.copied()
    for token in made.slot_mapping.argsort():
        assert torch.equal(one_by_one.alone(token[None]).run()[0], out[token])


def test_any_order_of_blocks_and_tokens_gives_the_same_bits() -> None:
    made = drawn_pass([3, 1], [40, 9], 1, (2, 2), (16, 16), 8, torch.float32)
    out = made.copied().run()
    order = torch.randperm(len(made.positions))
    assert torch.equal(made.copied().alone(order).run(), out[order])
    moved = torch.randperm(len(made.keys))
    keys, values = torch.empty_like(made.keys), torch.empty_like(made.values)
    keys[moved], values[moved] = made.keys, made.values
    elsewhere = torch.where(made.block_tables < 0, -1, moved[made.block_tables])
    assert torch.equal(replace(made, keys=keys, values=values, block_tables=elsewhere).run(), out)


def test_the_same_bits_for_any_number_of_threads() -> None:
    made = drawn_pass([2, 2, 1], [700, 3, 250], 0, (3, 3), (64, 64), 16, torch.float16)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(made.copied().run())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_branch_gets_the_bits_that_it_would_have_in_its_siblings_place() -> None:
    made = drawn_pass([4], [40], 0, (2, 2), (16, 16), 8, torch.float32, num_branches=2)
    out = made.copied().run()
    for begin, length in ((41, 1), (43, 2)):
        branch = (made.branches == begin) & (made.slot_mapping != made.positions)
        assert branch.sum() == length
        for token in branch.nonzero().flatten():
            sibling = made.slot_mapping == made.positions[token]
            assert not sibling.any() or not torch.equal(out[token], out[sibling][0])
        # Without the tokens beside it, and kept where it stands.
        others = ((made.slot_mapping == made.positions) & (made.positions < begin)) | branch
        own = made.copied().alone(others.nonzero().flatten())
        own.slot_mapping[:] = own.positions
        assert torch.equal(own.run()[branch[others]], out[branch])


def test_padding_writes_nothing_and_gets_zeros() -> None:
    made = drawn_pass([1], [4], 3, (2, 1), (8, 8), 4, torch.float32)
    before = made.keys.clone()
    out = made.run()
    padding = made.positions < 0
    assert not out[padding].any()
    assert out[~padding].all()
    changed = (made.keys.nan_to_num(9.0) != before.nan_to_num(9.0)).flatten(2).any(-1).sum()
    assert int(changed) == 1  # the one token's slot


def test_no_tokens_are_no_error() -> None:
    made = drawn_pass([1], [4], 0, (2, 1), (8, 8), 4, torch.float32)
    assert made.alone(torch.arange(0)).run().shape == (0, 2, 8)


def test_large_scores_do_not_overflow() -> None:
    made = drawn_pass([1], [9], 0, (1, 1), (4, 4), 4, torch.float32)
    out = replace(made.copied(), scaling=1e4).run()
    expected = reference.paged_attention(**vars(replace(made, scaling=1e4)))
    torch.testing.assert_close(out, expected, **CLOSE[torch.float32])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.randn(2, 3, 8), "3 query heads cannot share 2 key heads"),
        ("q", torch.randn(2, 4, 8).double(), "q must be float32, float16 or bfloat16"),
        ("q", torch.randn(2, 4, 16)[:, :, ::2], "last dimension of q"),
        ("k", torch.randn(2, 2, 9), r"k has shape \[2, 2, 9\], want \[2, any, 8\]"),
        ("v", torch.randn(2, 2, 8).half(), "v is of another dtype than q"),
        ("keys", torch.randn(3, 2, 8, 4).transpose(2, 3), "keys must be contiguous"),
        ("values", torch.randn(2, 2, 4, 8), "values has shape"),
        ("block_tables", torch.zeros(1, 3, dtype=torch.int32), "block_tables must be int64"),
        ("table_indices", torch.zeros(1, dtype=torch.int64), "table_indices has shape"),
        ("table_indices", torch.tensor([0, 1]), "token 1 has table index 1, but there are 1 block tables"),
        ("positions", torch.tensor([3, 12]), "token 1 has position 12, but its block table has 3 blocks of 4 tokens"),
        ("slot_mapping", torch.tensor([3, 12]), "token 1 is kept at position 12, but its block table has 3 blocks of 4 "
        "tokens"),
        ("slot_mapping", torch.tensor([3, 3]), "token 1 is kept at position 3"),
        ("branches", torch.tensor([3, 5]), "token 1 has position 4, but its branch begins at 5"),
        ("branches", torch.tensor([3, -1]), "token 1 has position 4, but its branch begins at -1"),
        ("slot_mapping", torch.zeros(1, dtype=torch.int64), "slot_mapping has shape"),
        ("block_tables", torch.tensor([[0, 3, 1]]), "entry 1 of block table 0 is 3, but the pool has 3 blocks"),
        ("window", -1, "at least 0"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(name: str, value: Tensor | int, message: str) -> None:
    made = Pass(
        q=torch.randn(2, 4, 8),
        k=torch.randn(2, 2, 8),
        v=torch.randn(2, 2, 8),
        keys=torch.zeros(3, 2, 4, 8),
        values=torch.zeros(3, 2, 4, 8),
        block_tables=torch.tensor([[2, 0, 1]]),
        table_indices=torch.tensor([0, 0]),
        positions=torch.tensor([3, 4]),
        slot_mapping=torch.tensor([3, 4]),
        branches=torch.tensor([3, 4]),
    )
    made.run()
    with pytest.raises(RuntimeError, match=message):
        replace(made, **{name: value}).run()


def test_block_table_entries_before_the_window_are_not_read() -> None:
    made = drawn_pass([1], [30], 0, (1, 1), (4, 4), 4, torch.float32, window=6)
    out = made.copied().run()
    made.block_tables[0, :6] = -1
    assert torch.equal(made.run(), out)


def test_its_fake_works_for_gpus_where_there_is_none() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(5, 6, 64, dtype=torch.float16, device="cuda"), torch.empty(5, 2, 64, device="cuda"))
        pool, places = (torch.empty(9, 2, 16, 64, device="cuda"), torch.zeros(5, dtype=torch.int64, device="cuda"))
        block_tables = torch.zeros(3, 4, dtype=torch.int64, device="cuda")
        out = paged_attention(q, k, k, pool, pool.clone(), block_tables, *[places] * 4)
    assert (out.shape, out.dtype, out.device.type) == ((5, 6, 64), torch.float16, "cuda")
    assert out.is_contiguous()
