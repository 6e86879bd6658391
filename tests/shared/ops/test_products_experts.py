"""Products of experts of GPUs where there is none: the Triton kernel in the interpreter against its reference, whatever
the tokens choose, alone and in company, with planted bugs; and how choices are sorted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from shared.ops.blocks import LAYOUTS, arranged, widened
from shared.ops.products import expert_linear, grouped, largest_shares
from tests.shared.ops.drawn_blocks import drawn_blocks, numbers_of
from tests.shared.ops.interpreted import PRODUCTS, launched, planted
from tests.shared.ops.test_products import BRAIN, CLOSE, HALF, SINGLE, close
from tests.tiers import tiered

# Experts, choices of a token, tokens, rows, columns, kind, capability, dtype.
CASES: dict[str, tuple[int, int, int, int, int, str, int, torch.dtype]] = {
    "plain matrices": (4, 2, 19, 70, 192, "", 90, HALF),
    "two experts": (2, 2, 9, 40, 100, "", 80, HALF),
    "one token": (128, 8, 1, 20, 64, "", 90, HALF),
    "many experts": (128, 4, 9, 20, 96, "Q8_0", 90, SINGLE),
    "without matrix units": (3, 1, 20, 40, 100, "", 75, BRAIN),
    "pieces": (3, 2, 11, 20, 2048, "Q6_K", 90, HALF),
    "biases": (4, 2, 19, 70, 192, "", 90, HALF),
    "biases of matrices in pieces": (3, 2, 11, 20, 1024, "Q4_K", 90, HALF),
    **{kind: (3, 2, 9, 20, 512, kind, 90, HALF) for kind in LAYOUTS if kind not in ("Q6_K", "Q8_0")},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def drawn(name: str) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Tokens, matrices as they are held, the same wide [E, N, K], and each token's experts, of which the first has
    none."""
    experts, choices, tokens, rows, width, kind, _, dtype = CASES[name]
    x = torch.randn(tokens, width).to(dtype)
    index = torch.stack([torch.randperm(experts - 1)[:choices] + 1 for _ in range(tokens)]) % experts
    index = index if index.shape[1] == choices else torch.arange(tokens * choices).view(tokens, choices) % experts
    if not kind:
        weight = torch.randn(experts, rows, width).to(dtype)
        return x, weight.view(-1, width), weight, index
    raw = drawn_blocks(experts * rows, width, kind)
    return x, tuple(arranged(raw, kind, width)), numbers_of(raw, kind).to(dtype).view(experts, rows, width), index


def wanted_of(x: Tensor, wide: Tensor, index: Tensor, bias: Tensor | None = None) -> Tensor:
    each = [(x[token].double() @ wide[expert].double().T) for token, own in enumerate(index) for expert in own]
    return torch.stack(each) + (0 if bias is None else bias[index.flatten()].double())


def check(name: str, folder: Path, source: Path = PRODUCTS) -> None:
    """All tokens together, in tiles of any size and with pieces one after another; each alone; the last ones in another
    order; and all of them at one expert."""
    experts, choices, tokens, rows, _, kind, capability, dtype = CASES[name]
    x, weight, wide, index = drawn(name)
    bias = (8 * torch.randn(experts, rows)).to(dtype) if name.startswith("biases") else None
    common = {"weight": weight, "kind": kind, "bias": bias, "capability": capability, "num_rows": rows}

    def call(x: Tensor, index: Tensor, size: int = 16, split: bool | None = None) -> dict[str, Any]:
        return common | {"x": x, "grouping": tuple(grouped(index, experts, size)), "split": split}

    order = torch.randperm(tokens)
    at_one = torch.full_like(index, experts - 1)
    # A pass of the products that follow, whose inputs are of choices.
    spread = x.repeat_interleave(choices, 0)
    most = 32 if capability < 80 or dtype == SINGLE else 64
    calls = [
        call(x, index), call(x, index, split=True), call(x, index, most, False), call(x[order], index[order]),
        call(x[-1:], index[-1:]), call(x, at_one), call(spread, index), call(x[:0], index[:0]),
    ]  # fmt: skip
    whole, split, large, moved, alone, one, apart, none = launched("multiplied", calls, folder, source)
    close(whole, wanted_of(x, wide, index, bias), CLOSE[dtype])
    assert torch.equal(split, whole)
    assert torch.equal(large, whole)
    assert torch.equal(moved.view(tokens, choices, rows), whole.view(tokens, choices, rows)[order])
    assert torch.equal(alone, whole[-choices:])
    close(one, wanted_of(x, wide, at_one, bias), CLOSE[dtype])
    assert torch.equal(apart, whole)
    assert none.shape == (0, rows)


@pytest.mark.parametrize(
    "name", tiered(CASES, {"plain matrices", "two experts", "one token", "without matrix units", "biases"})
)
def test_a_choice_gets_its_reference_and_the_same_bits_in_any_company(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


# What the kernel's source becomes, and a case that must show it.
BUGS = {
    "the matrix of another expert": ("held_row += tl.load(tiles + number)", "held_row += tl.load(tiles)", "plain"),
    "a token of another place": ("token // CHOICES", "token % num_tokens // CHOICES + (BT > 16)", "plain"),
    "a choice too few": ("there = own < count", "there = own < count - 1", "two"),
    "words of the first expert": ("rows * (i // WORD) + held_row", "rows * (i // WORD) + row", "Q4_K"),
    "scales of the first expert": ("(begin // 256) + held_row", "(begin // 256) + row", "pieces"),
    "groups as far apart as in one matrix": ("to(tl.int64) * 0 + all_rows", "to(tl.int64) * 0 + num_rows", "Q4_0"),
    "the bias of the first expert": ("bias + held_row", "bias + row", "biases"),
    "pieces as far apart as in all matrices": ("* num_rows * numbers", "* rows * numbers", "pieces"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    right, wrong, case = BUGS[bug]
    source = planted(PRODUCTS, right, wrong, tmp_path)
    with pytest.raises(AssertionError):
        check(next(name for name in CASES if name.startswith(case)), tmp_path, source)


@pytest.mark.parametrize(
    ("experts", "choices", "tokens"), [(2, 1, 1), (4, 2, 40), (128, 8, 1), (128, 8, 50), (3, 3, 7)]
)
@pytest.mark.parametrize("size", [16, 64])
def test_each_choice_is_in_one_tile_of_its_expert(experts: int, choices: int, tokens: int, size: int) -> None:
    for index in (
        torch.rand(tokens, experts).topk(choices).indices,
        torch.full((tokens, choices), experts - 1),
        torch.zeros(tokens, choices, dtype=torch.int64),
        torch.randint(experts + 1, (tokens, choices)),  # numbers beyond the last one stand for none
    ):
        places, tiles, _ = grouped(index, experts, size)
        found: dict[int, int] = {}
        for expert, first, count in tiles.T.tolist():
            assert count <= size
            for place in places[first : first + count].tolist():
                assert place not in found
                found[place] = expert
        assert found == {place: e for place, e in enumerate(index.flatten().tolist()) if e < experts}


def test_ops_keep_the_contract_of_torch() -> None:
    x, weight = torch.randn(7, 64), torch.randn(4, 5, 64)
    blocks = arranged(drawn_blocks(20, 64, "Q4_0"), "Q4_0", 64)
    logits = torch.randn(7, 4)
    shares, index = largest_shares(logits, 2, True)
    assert torch.equal(index, logits.topk(2).indices)
    torch.testing.assert_close(shares, logits.topk(2).values.softmax(-1))
    opcheck(torch.ops.neap.largest_shares.default, (logits, 2, False))
    grouping = grouped(index, 4, 16)
    bias = torch.randn(4, 5)
    opcheck(torch.ops.neap.expert_linear.default, (x, [weight], bias, index, *grouping, 5, ""))
    opcheck(torch.ops.neap.expert_linear.default, (x, [*blocks], None, index, *grouping, 5, "Q4_0"))
    wide = widened(blocks, "Q4_0", 64).view(4, 5, 64)
    found = expert_linear(x, blocks, index, grouping, 5, "Q4_0")
    assert torch.equal(found, expert_linear(x, [wide], index, grouping, 5))
    close(found, wanted_of(x, wide, index), 1e-5)
    close(expert_linear(x, blocks, index, grouping, 5, "Q4_0", bias), wanted_of(x, wide, index, bias), 1e-5)


def test_wrong_arguments_are_named() -> None:
    x, weight, index = torch.randn(2, 64), torch.randn(4, 5, 64), torch.tensor([[0, 3], [1, 2]])
    grouping, blocks = grouped(index, 4, 16), arranged(drawn_blocks(21, 64, "Q4_0"), "Q4_0", 64)
    for message, run in {
        "x must be": lambda: expert_linear(x[None], [weight], index, grouping, 5),
        "index must be": lambda: expert_linear(x, [weight], index.int(), grouping, 5),
        "grouping must be": lambda: expert_linear(x, [weight], index, grouping._replace(places=index), 5),
        "21 rows are not": lambda: expert_linear(x, blocks, index, grouping, 5, "Q4_0"),
        "held has shape": lambda: expert_linear(x, [weight], index, grouping, 6),
        "weight must be": lambda: expert_linear(x, [weight.half()], index, grouping, 5),
        "bias must be": lambda: expert_linear(x, [weight], index, grouping, 5, "", weight[:2, :, 0].contiguous()),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            run()
