"""A router's choices and the sum of its experts against their references, and in any company."""

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared import ops
from shared.ops import reference
from shared.ops.experts import choose_experts, expert_table, experts
from tests.gguf_files import blocks

DRAWN = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _matrices(count: int, inner: int, width: int) -> list[Tensor]:
    return [torch.randn(shape) / shape[1] ** 0.5 for shape in [(inner, width), (inner, width), (width, inner)] * count]


@DRAWN
@given(
    tokens=st.sampled_from([1, 2, 7, 200]),
    count=st.sampled_from([1, 3, 40]),
    chosen=st.sampled_from([1, 3]),
    inner=st.sampled_from([5, 64]),
    width=st.sampled_from([12, 70]),
    threads=st.sampled_from([1, 3]),
    activation=st.sampled_from(["silu", "gelu_tanh", "clamped_swish"]),
    biased=st.booleans(),
)
def test_experts_are_those_of_the_reference_alone_and_in_company(
    isa: str, tokens: int, count: int, chosen: int, inner: int, width: int, threads: int, activation: str, biased: bool
) -> None:
    matrices, x = _matrices(count, inner, width), 5 * torch.randn(tokens, width)  # so that some numbers are clamped
    biases = (torch.randn(count, 2 * inner), torch.randn(count, width)) if biased else (None, None)
    table = expert_table([ops.pack_linear(each) for each in matrices], *biases)
    index, shares = torch.randint(0, count + 1, (tokens, chosen)), torch.rand(tokens, chosen)  # count: none
    torch.set_num_threads(threads)
    out = experts(x, index, shares, table, activation)
    torch.set_num_threads(1)
    expected = reference.experts(x, index, shares, matrices, activation, *biases)
    torch.testing.assert_close(out, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)
    for token in range(0, tokens, 17):
        own = slice(token, token + 1)
        assert torch.equal(experts(x[own], index[own], shares[own], table, activation), out[own])


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q8_0])
@pytest.mark.parametrize("rounded", [False, True])
def test_experts_have_the_bits_of_single_products(isa: str, kind: Kind, rounded: bool) -> None:
    matrices = [torch.from_numpy(blocks(256, 256, kind, seed)) for seed in range(9)]
    packed = [ops.pack_blocks(each, kind.name, 256) for each in matrices]
    for each in packed if rounded else ():
        ops.round_inputs_(each)
    x, index, shares = torch.randn(20, 256), torch.randint(0, 3, (20, 2)), torch.rand(20, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reference, "packed_gated_linear", lambda x, gate, up, act, _: ops.packed_gated_linear(x, gate, up, 256, act)
        )
        patch.setattr(reference, "packed_linear", lambda x, down, _: ops.packed_linear(x, down, 256))
        expected = reference.experts(x, index, shares, packed, "silu")
    assert torch.equal(experts(x, index, shares, expert_table(packed), "silu"), expected)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("count", "chosen", "biased"), [(1, 1, False), (3, 3, True), (21, 4, False), (32, 4, True), (128, 8, False)]
)
def test_choices_are_those_of_the_reference_alone_and_in_company(
    isa: str, count: int, chosen: int, biased: bool, normed: bool
) -> None:
    x, router = torch.randn(30, 48), torch.randn(count, 48)
    packed, bias = ops.pack_linear(router), 3 * torch.randn(count) if biased else None
    made = choose_experts(x, packed, count, chosen, normed, bias)
    for actual, expected in zip(made, reference.choose_experts(x, router, chosen, normed, bias), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for token in (0, 29):
        alone = choose_experts(x[token : token + 1], packed, count, chosen, normed, bias)
        assert all(torch.equal(each[0], together[token]) for each, together in zip(alone, made, strict=True))


def test_of_equal_logits_the_first_expert_is_chosen(isa: str) -> None:
    _, shares, index = choose_experts(torch.zeros(2, 8), ops.pack_linear(torch.randn(5, 8)), 5, 3, False)
    assert index.tolist() == [[0, 1, 2]] * 2
    assert shares.tolist() == [pytest.approx([0.2] * 3)] * 2


def test_logits_that_are_no_numbers_choose_experts_that_there_are(isa: str) -> None:
    x = torch.full((2, 8), float("nan"))
    _, _, index = choose_experts(x, ops.pack_linear(torch.randn(5, 8)), 5, 3, True)
    assert bool(((index >= 0) & (index < 5)).all())


def test_a_table_keeps_its_experts_and_sees_that_they_round_later() -> None:
    matrices = [each.bfloat16() for each in _matrices(2, 16, 12)]
    packed = [ops.pack_linear(each) for each in matrices]
    table, x = expert_table(packed), torch.randn(3, 12)
    index, shares = torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    before = experts(x, index, shares, table, "silu")
    for each in packed:
        ops.round_inputs_(each)
    rounded = experts(x, index, shares, table, "silu")
    assert not torch.equal(rounded, before)
    del packed, each
    torch.randn(100_000)
    assert torch.equal(experts(x, index, shares, table, "silu"), rounded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 11)}, "does not fit experts of 12 inputs"),
        ({"index": torch.zeros(3, 2, dtype=torch.int32)}, "must be int64"),
        ({"index": torch.zeros(2, 2, dtype=torch.int64)}, "a row for each of x"),
        ({"index": torch.tensor([[0, -1]] * 3)}, "index -1 is negative"),
        ({"table": torch.zeros(64, dtype=torch.uint8)}, "not a table"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
    ],
)
def test_wrong_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "x": torch.zeros(3, 12),
        "index": torch.zeros(3, 2, dtype=torch.int64),
        "shares": torch.zeros(3, 2),
        "table": expert_table([ops.pack_linear(each) for each in _matrices(2, 16, 12)]),
        "activation": "silu",
    }
    with pytest.raises(RuntimeError, match=message):
        experts(**{**arguments, **change})


def test_experts_of_other_sizes_are_no_table() -> None:
    packed = [ops.pack_linear(each) for each in [*_matrices(1, 16, 12), *_matrices(1, 15, 12)]]
    with pytest.raises(RuntimeError, match=r"a gate is a matrix \[15, 12\], want \[16, 12\]"):
        expert_table(packed)
    with pytest.raises(RuntimeError, match="5 matrices, want gate, up and down"):
        expert_table(packed[:5])
    with pytest.raises(RuntimeError, match=r"inner_bias has shape \[1, 31\], want \[1, 32\]"):
        expert_table(packed[:3], torch.zeros(1, 31))
    with pytest.raises(RuntimeError, match=r"bias has shape \[12, 1\], want \[1, 12\]"):
        expert_table(packed[:3], None, torch.zeros(12, 1))
