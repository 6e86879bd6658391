"""Paged attention of GPUs where there is none: the Triton kernels in the interpreter against their reference, alone and
in company, with planted bugs; and what torch's products make of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.ops import paged_on_gpu, reference
from shared.ops.paged_tiles import num_pieces
from tests.shared.ops.interpreted import SOURCE, Call, interpreted, planted
from tests.shared.ops.paged_passes import CLOSE, WRONG_ARGUMENTS, Pass, drawn_pass

pytest.importorskip("triton", reason="Triton has no wheel for this system")

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
# A token's heads, of 4 tokens a tile in the interpreter: (group, key heads).
FOUR = (4, 1)


def same(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


# Sequences as (new tokens, tokens before) of each; padding, heads, widths, tokens of a block, dtype, options.
CASES = {
    "several tokens of a tile, and padding": ([3, 1, 2], [5, 8, 0], 2, (3, 2), (16, 24), 16, HALF, {}),
    "pieces, of which the window leaves some out": ([5, 2], [600, 3], 1, FOUR, (24, 16), 16, SINGLE, {"window": 300}),
    "larger pieces": ([2], [4607], 0, (2, 1), (16, 16), 16, HALF, {"softcap": 2.0}),
    "a border of larger pieces in a tile's window": ([3], [4607], 0, FOUR, (16, 16), 16, HALF, {"window": 100}),
    "blocks and widths of no power of two": ([4, 1], [30, 300], 0, (2, 1), (5, 36), 7, SINGLE, {"window": 34}),
    "more heads than a tile has rows": ([2], [20], 1, (70, 1), (16, 16), 16, HALF, {}),
    "sinks": ([3, 1], [300, 8], 1, (3, 2), (16, 24), 16, HALF, {"sinks": torch.linspace(-3, 4, 6).half()}),
    "sinks and a window": ([2], [600], 0, FOUR, (16, 16), 16, SINGLE, {"sinks": torch.arange(4.0), "window": 30}),
    "without matrix units": ([3], [300], 0, (2, 2), (40, 16), 16, BRAIN, {"softcap": 5.0}),
}  # fmt: skip


def drawn(name: str) -> tuple[Pass, int]:
    """The pass of a case, with all tokens of a sequence in a row, and the compute capability of its device."""
    counts, lengths, padding, heads, widths, block_tokens, dtype, options = CASES[name]
    made = drawn_pass(counts, lengths, padding, heads, widths, block_tokens, dtype, True, **options)
    order = sorted(range(len(made.positions)), key=lambda t: (int(made.table_indices[t]), int(made.positions[t])))
    return made.alone(torch.tensor(order)), 75 if dtype == BRAIN else 90


def check(name: str, folder: Path, source: Path = SOURCE) -> None:
    """Whole tiles and split ones, many programs and one, any order of tokens, each token alone: one result, which is
    the reference's."""
    made, capability = drawn(name)
    expected = made.copied()
    wanted = reference.paged_attention(**vars(expected))
    held = replace(made, keys=expected.keys, values=expected.values)
    order = torch.randperm(len(made.positions))
    real = [int(token) for token in (made.positions >= 0).nonzero()]
    lone = [real[0], real[-1]]
    calls = [
        Call(made, True, capability),
        Call(made, False, capability),
        Call(made.alone(order), None, capability, 1),
        *(Call(held.alone(torch.tensor([token])), index == 0, capability) for index, token in enumerate(lone)),
    ]
    split, whole, mixed, *alone = interpreted(calls, folder, source)
    torch.testing.assert_close(split[0], wanted, **CLOSE[made.q.dtype])
    for found in (split, whole, mixed):
        same(found[1], expected.keys)
        same(found[2], expected.values)
    same(whole[0], split[0])
    same(mixed[0], split[0][order])
    for token, found in zip(lone, alone, strict=True):
        same(found[0][0], split[0][token])


@pytest.mark.parametrize("name", CASES)
def test_a_token_gets_its_reference_and_the_same_bits_in_any_company(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_places_that_do_not_exist_give_nan_and_harm_nobody(tmp_path: Path) -> None:
    made = drawn_pass([1, 1, 1, 1], [9, 9, 9, 9], 1, (2, 1), (16, 16), 4, SINGLE)
    sound = reference.paged_attention(**vars(made.copied()))
    made.block_tables[0, 1], made.block_tables[1, 2] = -5, len(made.keys)
    lost = (made.table_indices < 3) & (made.positions >= 0)
    made.table_indices[made.table_indices == 2] = 4
    results = [out for out, *_ in interpreted([Call(made.copied(), True), Call(made.copied(), False)], tmp_path)]
    for out in (*results, by_torch(made.copied())):
        assert out[lost].isnan().all()
        torch.testing.assert_close(out[~lost], sound[~lost], **CLOSE[SINGLE])


# What the kernels' source becomes, and a case that must show it.
BUGS = {
    "a key too many": ("key_at[None, :] <= at[:, None]", "key_at[None, :] <= at[:, None] + 1", "several"),
    "a window that is too wide": ("at[:, None] - key_at[None, :] < window", "at[:, None] - key_at[None, :] <= window",
                                  "pieces"),
    "a piece that ends a block of keys early": ("tl.minimum(end, last + 1)", "tl.minimum(end - BK, last + 1)",
                                                "pieces"),
    "pieces that are joined without their shares": ("joined = joined * keep + sums * add", "joined = joined + sums",
                                                    "larger"),
    "the last pieces are not joined": ("mask=dv < tl.where(last >= piece", "mask=dv < tl.where(last > piece", "pieces"),
    "a token that follows another sequence's is left out": ("(table_before == table) & ", "", "several"),
    "a tile's rows of another sequence": (" & (owner == table)", "", "several"),
    "a token that is written a position early": ("slot = (block * KV_HEADS + head) * G + at % G",
                                                 "slot = (block * KV_HEADS + head) * G + tl.maximum(at - 1, 0) % G",
                                                 "several"),
    "rows beyond a group": ("live = live & (of_group < GROUP)", "live = live & (of_group < GROUP + 1)", "several"),
    "a tile that goes on beyond its border": (" & (at % TOK != 0)", "", "a border"),
    "a sink of another head": ("tl.load(sinks + head,", "tl.load(sinks + kv_head,", "sinks"),
    "a sink that pieces do not have": ("keep, whole = add_sink(most, whole, tl.load(sinks + tl.program_id(1)))",
                                       "keep = 1.0", "sinks"),
    "a share of the list of work left out": ("start += tl.sum(count, 0)", "start += tl.max(count, 0)", "pieces"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    right, wrong, case = BUGS[bug]
    source = planted(SOURCE, right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        check(next(name for name in CASES if name.startswith(case)), tmp_path, source)


def by_torch(made: Pass) -> Tensor:
    return paged_on_gpu.by_torch(**vars(made))


@pytest.mark.parametrize("name", CASES)
def test_torch_stands_in_for_the_kernels(name: str) -> None:
    made, _ = drawn(name)
    expected, own = made.copied(), made.copied()
    wanted = reference.paged_attention(**vars(expected))
    torch.testing.assert_close(by_torch(own), wanted, **CLOSE[made.q.dtype])
    same(own.keys, expected.keys)
    same(own.values, expected.values)


def test_torch_writes_nothing_for_padding_alone() -> None:
    made = drawn_pass([1], [4], 2, (2, 1), (8, 8), 4, SINGLE)
    own = made.alone((made.positions < 0).nonzero()[:, 0])
    before = own.copied()
    assert not by_torch(own).any()
    same(own.keys, before.keys)


def test_nothing_waits_for_the_device() -> None:
    """What depends on numbers on the device would not be captured."""
    from shared.model.recorder import host_syncs

    made, _ = drawn("pieces, of which the window leaves some out")
    assert not host_syncs(lambda: by_torch(made))


def test_pieces_are_counted_as_the_kernels_cut_them() -> None:
    borders = [*range(0, 4096, 256), *(eighth << octave for octave in range(9, 14) for eighth in range(8, 16))]
    for number, border in enumerate(borders):
        assert num_pieces(border + 1) == number + 1
        assert num_pieces(max(border, 1)) == max(number, 1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    WRONG_ARGUMENTS,
)
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
    )
    with pytest.raises(RuntimeError, match=message):
        paged_on_gpu.paged_attention(**{**vars(made), name: value})
