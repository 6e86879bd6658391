"""Products and norms of GPUs where there is none: the Triton kernels in the interpreter against their references, alone
and in company, with planted bugs; and how GGUF's blocks lie in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from shared.ops import products
from shared.ops.blocks import LAYOUTS, arranged, joined, widened
from shared.ops.products import blocks_linear, invariant_linear
from tests.shared.ops.drawn_blocks import drawn_blocks, numbers_of
from tests.shared.ops.interpreted import PRODUCTS, launched, planted
from tests.tiers import tiered

pytest.importorskip("triton", reason="Triton has no wheel for this system")

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CLOSE = {SINGLE: 1e-5, HALF: 2e-3, BRAIN: 1e-2}
# Rows, columns, kind, capability, dtype.
CASES = {
    "a plain matrix": (70, 192, "", 90, HALF),
    "columns that are no whole step": (40, 100, "", 80, HALF),
    "without matrix units": (40, 100, "", 75, BRAIN),  # the interpreter has no products of bfloat16
    "in float32": (40, 64, "", 90, SINGLE),
    "blocks of 32 in pieces": (70, 1056, "Q4_1", 90, HALF),
    "a tile of several forms": (20, 96, "Q8_0", 75, SINGLE),
    "five bits": (20, 544, "Q5_0", 90, HALF),
    "floats of 4 bits": (20, 544, "MXFP4", 90, HALF),
    "six bits in pieces": (20, 2048, "Q6_K", 90, SINGLE),
    **{kind: (20, 512, kind, 90, HALF) for kind in ("Q4_0", "Q5_1", "Q4_K", "Q5_K")},
    "a zero for 32": (20, 96, "W4_32", 90, HALF),
    "a zero for 64": (20, 192, "W4_64", 75, SINGLE),
    "a zero for 128 in pieces": (70, 1152, "W4_128", 90, HALF),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (found.float() - wanted.float()).abs().max() <= tolerance * wanted.float().abs().max()


def check(name: str, folder: Path, source: Path = PRODUCTS) -> None:
    """Tiles of any number of tokens, in pieces side by side and one after another, and each token alone: one result,
    which is the reference's."""
    rows, width, kind, capability, dtype = CASES[name]
    x, bias = torch.randn(40, width).to(dtype), torch.randn(rows).to(dtype)
    weight: Any = torch.randn(rows, width).to(dtype)
    wanted_weight = weight
    if kind:
        raw = drawn_blocks(rows, width, kind)
        weight, wanted_weight = arranged(raw, kind, width), numbers_of(raw, kind).to(dtype)
    wanted = products.reference_linear(x, wanted_weight, bias)
    common = {"weight": weight if isinstance(weight, Tensor) else tuple(weight), "kind": kind, "bias": bias,
              "capability": capability}  # fmt: skip
    calls = [
        common | {"x": x, "split": False},
        common | {"x": x, "split": True},
        common | {"x": x[:3], "tokens": 256},
        common | {"x": x[39:]},
        common | {"x": x[20:37].reshape(1, 17, 1, width)},
        common | {"x": torch.cat([x, x], 1)[:, :width], "bias": None},
        common | {"x": x[:0]},
    ]
    whole, split, wide, alone, some, bare, none = launched("multiplied", calls, folder, source)
    close(whole, wanted, CLOSE[dtype])
    assert torch.equal(split, whole)
    assert torch.equal(wide, whole[:3])
    assert torch.equal(alone, whole[39:])
    assert torch.equal(some, whole[20:37].view(1, 17, 1, rows))
    close(bare, products.reference_linear(x, wanted_weight, None), CLOSE[dtype])
    assert none.shape == (0, rows)


RARELY = {name for name in CASES if name.endswith("in pieces")} | {"Q5_K", "Q5_1", "five bits"}


@pytest.mark.parametrize("name", tiered(CASES, CASES.keys() - RARELY))
def test_a_token_gets_its_reference_and_the_same_bits_in_any_company(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


# What the kernels' source becomes, and a case that must show it.
BUGS = {
    "tokens of a wide tile in another order": ("sums = tl.zeros((BN, BT), tl.float32)",
                                               "sums = tl.zeros((BN, BT), tl.float32) + BT * 1e-3", "a plain"),
    "a column left out": ("(begin + k < width)[:, None]", "(begin + k < width - 1)[:, None]", "columns"),
    "pieces that are added from behind": ("stride * piece + at", "stride * (PIECES - 1 - piece) + at", "six bits"),
    "a piece left out": ("tl.static_range(PIECES)", "tl.static_range(PIECES - 1)", "six bits"),
    "no bias behind pieces": ("bias + at % num_rows", "bias + at // num_rows", "blocks of 32"),
    "halves of bytes exchanged": ("low >> (4 * (i % 2))", "low >> (4 - 4 * (i % 2))", "blocks of 32"),
    "further bits of another group": ("upper >> (2 * (i % 4))", "upper >> (2 * (i % 2))", "six bits"),
    "a fifth bit of another group": ("upper >> (i % 8)", "upper >> (i % 4)", "five bits"),
    "a scale for 32 columns instead of 16": ("[None, :] < 16", "[None, :] < 17", "six bits"),
    "a scale without its sign": ("(words << (24 - 16 * (GROUP % 2))) >> 24", "(words >> (16 * (GROUP % 2))) & 255",
                                 "six bits"),
    "an addend of another group": ("words >> (16 + 8 * (GROUP % 2))", "words >> 16", "Q4_K"),
    "quants without a zero": ("(quants - ZERO)", "quants", "Q4_0"),
    "bytes without a sign": ("low.to(tl.int8, bitcast=True)", "low", "a tile of"),
    "a zero of other bits": ("(words >> 16)[:, None]", "(words >> 17)[:, None]", "a zero for 64"),
    "a word of the groups before": ("rows * (i // WORD)", "rows * 0 * (i // WORD)", "Q5_K"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    right, wrong, case = BUGS[bug]
    source = planted(PRODUCTS, right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        check(next(name for name in CASES if name.startswith(case)), tmp_path, source)


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN])
def test_norms_are_those_of_torch_and_do_not_depend_on_company(dtype: torch.dtype, tmp_path: Path) -> None:
    x, weight, bias = torch.randn(3, 2, 100).to(dtype), torch.randn(100).to(dtype), torch.randn(100).to(dtype)
    common = {"weight": weight, "bias": None, "eps": 1e-3, "offset": 0.0}
    calls = [
        common | {"x": x + 2},
        common | {"x": x + 2, "offset": 1.0},
        common | {"x": x + 2, "bias": bias},
        common | {"x": (x + 2)[1:2, 1]},
    ]
    plain, above, centred, alone = launched("normed", calls, tmp_path)
    wide = (x + 2).float()
    close(plain, F.rms_norm(wide, (100,), weight.float(), 1e-3), CLOSE[dtype])
    close(above, F.rms_norm(wide, (100,), weight.float() + 1, 1e-3), CLOSE[dtype])
    close(centred, F.layer_norm(wide, (100,), weight.float(), bias.float(), 1e-3), CLOSE[dtype])
    assert torch.equal(alone, plain[1:2, 1])


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("width", [32, 96, 576, 256, 768])
def test_blocks_stand_for_the_numbers_of_the_file(kind: str, width: int) -> None:
    layout = LAYOUTS[kind]
    if width % layout.block:
        pytest.skip("whole blocks of this kind have more columns")
    raw = drawn_blocks(5, width, kind)
    blocks, wanted = arranged(raw, kind, width), numbers_of(raw, kind)
    assert torch.equal(widened(blocks, kind, width), wanted)
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(widened(blocks, kind, width, rows), wanted[rows])
    both = joined([blocks, arranged(raw[:2], kind, width)])
    assert torch.equal(widened(both, kind, width), torch.cat([wanted, wanted[:2]]))
    if width % layout.step == 0:
        assert sum(part.nbytes for part in blocks) <= 1.12 * raw.nbytes


def test_ops_keep_the_contract_of_torch() -> None:
    x, weight, bias = torch.randn(2, 3, 64), torch.randn(5, 64), torch.randn(5)
    blocks = arranged(drawn_blocks(5, 64, "Q4_0"), "Q4_0", 64)
    opcheck(torch.ops.neap.invariant_linear.default, (x, weight, bias))
    opcheck(torch.ops.neap.invariant_linear.default, (x, weight, None))
    opcheck(torch.ops.neap.blocks_linear.default, (x, *blocks, bias, "Q4_0"))
    torch.testing.assert_close(invariant_linear(x, weight, bias), F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    wide = widened(blocks, "Q4_0", 64)
    assert torch.equal(blocks_linear(x, blocks, "Q4_0", bias), invariant_linear(x, wide, bias))


def test_wrong_arguments_are_named() -> None:
    x, weight = torch.randn(2, 64), torch.randn(5, 64)
    blocks = arranged(drawn_blocks(5, 64, "Q4_0"), "Q4_0", 64)
    for message, run in {
        "x must be": lambda: invariant_linear(x.double(), weight.double()),
        "weight must be": lambda: invariant_linear(x, weight.half()),
        "contiguous": lambda: invariant_linear(x, torch.randn(64, 5).T),
        "x has shape": lambda: invariant_linear(x[:, 1:], weight),
        "bias must be": lambda: invariant_linear(x, weight, torch.randn(4)),
        "kind is 'Q3_K'": lambda: blocks_linear(x, blocks, "Q3_K"),
        "scales has shape": lambda: blocks_linear(x, blocks._replace(scales=blocks.scales[:, 1:]), "Q4_0"),
        "low has shape": lambda: blocks_linear(x, blocks, "Q8_0"),
        "low must be": lambda: blocks_linear(x, blocks._replace(low=blocks.low.int()), "Q4_0"),
        "have 256 columns": lambda: blocks_linear(x, blocks, "Q4_K"),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            run()
    with pytest.raises(RuntimeError, match="too wide"):
        products.normed(torch.randn(1, 1 << 16), torch.randn(1 << 16), None, 1e-5, 0.0)
    with pytest.raises(RuntimeError, match="x has shape"):
        products.normed(x, torch.randn(5), None, 1e-5, 0.0)
