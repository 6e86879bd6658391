"""Paged attention on a CPU, which is its reference: against attention over keys that stand in order, over passes drawn
by hypothesis."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shared.ops import reference
from shared.ops.paged import paged_attention
from tests.shared.ops.paged_passes import CLOSE, Pass, drawn_pass

DRAWN = settings(max_examples=60)


def in_order(made: Pass, tokens: Tensor) -> Tensor:
    """The result of all tokens of one sequence, in the order of their positions, from keys and values that are not in
    blocks."""
    table = made.block_tables[made.table_indices[tokens[0]]]
    positions = made.positions[tokens]
    end, block_tokens = int(positions.max()) + 1, made.keys.shape[2]
    at = torch.arange(end)
    keys, values = (
        pool[table[at // block_tokens], :, at % block_tokens].transpose(0, 1)[None] for pool in (made.keys, made.values)
    )
    near = positions[:, None] - at < made.window if made.window else torch.tensor(True)
    mask = ((at <= positions[:, None]) & near)[None, None]
    q, softcap = made.q[tokens].transpose(0, 1)[None], made.softcap or None
    return reference.contiguous_attention(q, keys, values, end, mask, False, made.scaling, softcap)[0]


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
)  # fmt: skip
def test_paged_attention_is_that_over_keys_in_order_and_ignores_its_neighbours(
    shape: list[tuple[int, int]],
    padding: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    block_tokens: int,
    dtype: torch.dtype,
    transposed: bool,
    softcap: float,
    window: int,
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
        softcap=softcap,
        window=window,
    )
    own = made.copied()
    out = own.run()
    assert out.dtype == dtype
    assert out.is_contiguous()
    for table in range(len(counts)):
        tokens = (made.table_indices == table).nonzero().flatten()
        if len(tokens):
            torch.testing.assert_close(out[tokens], in_order(own, tokens), **CLOSE[dtype])
    # Token by token in the order of positions, the bits must be the same.
    one_by_one = made.copied()
    for token in made.positions.argsort():
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
    made = replace(made, scaling=1e4)
    torch.testing.assert_close(made.run(), in_order(made, torch.arange(1)), **CLOSE[torch.float32])


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
        out = paged_attention(q, k, k, pool, pool.clone(), block_tables, *[places] * 2)
    assert (out.shape, out.dtype, out.device.type) == ((5, 6, 64), torch.float16, "cuda")
    assert out.is_contiguous()
