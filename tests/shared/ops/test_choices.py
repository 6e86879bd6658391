"""The choice of a token for each row of scores: the CPU kernels against their references."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.ops import (
    NO_TOKEN,
    choose_greedy,
    choose_packed,
    choose_sampled,
    pack_linear,
    packed_linear,
    reference,
    round_inputs_,
    unpack_linear,
)

DRAWN = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


@DRAWN
@given(
    rows=st.integers(0, 9),
    vocabulary=st.one_of(st.integers(1, 9), st.sampled_from([64, 200, 513, 1000])),
    dtype=DTYPES,
    strided=st.booleans(),
)
def test_the_first_of_the_largest_is_chosen(
    isa: str, rows: int, vocabulary: int, dtype: torch.dtype, strided: bool
) -> None:
    # Few different values, so that there are ties.
    logits = torch.randint(-3, 4, (rows, vocabulary + 3 * strided)).to(dtype)[:, :vocabulary]
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert choose_greedy(logits).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_rows_that_are_not_finite_choose_no_token(isa: str, dtype: torch.dtype) -> None:
    """Single numbers may be -inf: masks and filters make them so."""
    logits = torch.randn(7, 777).to(dtype)
    logits[0] = float("-inf")
    logits[1, [5, 600]] = float("inf")
    logits[2, [700, 300]] = float("nan")
    logits[3] = float("nan")
    logits[4, :] = float("-inf")
    logits[4, 3] = 1.0
    logits[5, 776] = 50.0
    logits[6, 776] = float("nan")
    expected = [NO_TOKEN] * 4 + [3, 776, NO_TOKEN]
    assert choose_greedy(logits).tolist() == expected
    assert reference.choose_greedy(logits).tolist() == expected
    masses = logits.clamp(min=0)
    masses[0, 0] = float("-inf")
    uniforms = torch.full((7,), 1 - 1e-16, dtype=torch.float64)
    expected = reference.choose_sampled(masses, uniforms).tolist()
    assert choose_sampled(masses, uniforms).tolist() == expected
    assert expected[:5] == [NO_TOKEN] * 4 + [3]
    assert choose_sampled(masses * 0 + 0.0, uniforms).tolist()[4:6] == [NO_TOKEN] * 2


@DRAWN
@given(
    rows=st.one_of(st.integers(0, 14), st.sampled_from([96, 97])),
    vocabulary=st.one_of(st.integers(1, 40), st.sampled_from([385, 400, 2000])),
    width=st.sampled_from([1, 7, 40, 300]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    rounds=st.booleans(),
)
def test_products_are_chosen_as_from_their_logits(
    isa: str, rows: int, vocabulary: int, width: int, dtype: torch.dtype, rounds: bool
) -> None:
    # Few different numbers, so that there are ties, within a panel and between those of two threads.
    packed = pack_linear(torch.randint(-1, 2, (vocabulary, width)).to(dtype))
    if rounds and dtype == torch.bfloat16:
        round_inputs_(packed)
    x = torch.randint(-1, 2, (rows, width)).float()
    if rows > 3:
        x[rows // 2, width // 2] = float("nan")
        x[rows // 3, width // 3] = float("inf")
    expected = choose_greedy(packed_linear(x, packed, vocabulary))
    assert torch.equal(choose_packed(x, packed, vocabulary), expected)
    assert torch.equal(reference.choose_packed(x, unpack_linear(packed)), expected)
    alone = [choose_packed(row, packed, vocabulary) for row in x.split(1) if rows]
    assert torch.equal(torch.cat([expected[:0], *alone]), expected)


def test_single_products_that_are_not_finite_count_as_in_logits(isa: str) -> None:
    weight = torch.zeros(800, 4)
    weight[:, 0] = -1.0
    weight[700, 0], weight[:, 3] = 1.0, -torch.arange(800.0)
    for place, value in ((3, float("nan")), (799, float("nan")), (640, float("inf")), (5, float("-inf"))):
        strange = weight.clone()
        strange[place, 0] = value
        packed, x = pack_linear(strange), torch.eye(4)[[0, 1, 3]]
        expected = choose_greedy(packed_linear(x, packed, 800)).tolist()
        assert choose_packed(x, packed, 800).tolist() == expected
        assert (expected[0] == NO_TOKEN) == (value != float("-inf"))


@DRAWN
@given(rows=st.integers(1, 6), vocabulary=st.integers(2, 60), dtype=DTYPES)
def test_sampled_choices_agree_with_their_reference(isa: str, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    target = torch.randn(rows, vocabulary).mul(2).softmax(-1).to(dtype)
    uniforms = torch.rand(rows, dtype=torch.float64)
    expected = reference.choose_sampled(target, uniforms)
    assert torch.equal(choose_sampled(target, uniforms), expected)


def test_sampling_keeps_the_distribution() -> None:
    target = torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0])
    count = 40_000
    uniforms = torch.rand(count, dtype=torch.float64)
    choices = choose_sampled(target.expand(count, -1).contiguous(), uniforms)
    shares = choices.bincount(minlength=5) / count
    torch.testing.assert_close(shares, target, atol=0.012, rtol=0)


def test_a_point_past_all_mass_takes_the_last_token_that_has_any(isa: str) -> None:
    target = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    almost = torch.tensor([1.0 - 1e-16], dtype=torch.float64)
    assert choose_sampled(target, almost).tolist() == [2]
    assert choose_sampled(target, almost * 0).tolist() == [1]


def test_wrong_arguments_are_named() -> None:
    scores = torch.randn(3, 5)
    with pytest.raises(RuntimeError, match="uniforms must be float64"):
        choose_sampled(scores, torch.rand(3))
    with pytest.raises(RuntimeError, match=r"uniforms has shape \[2\], want \[3\]"):
        choose_sampled(scores, torch.rand(2, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="out_features must be positive"):
        choose_packed(scores, pack_linear(scores[:0]), 0)
    with pytest.raises(RuntimeError, match=r"packed is a matrix \[3, 5\], want \[4, 5\]"):
        choose_packed(scores, pack_linear(scores), 4)
    with pytest.raises(RuntimeError, match="logits have no columns"):
        choose_greedy(scores[:, :0])
    with pytest.raises(RuntimeError, match="last dimension of logits must be contiguous"):
        choose_greedy(scores.T)
