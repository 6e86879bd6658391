import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import ops
from shared.ops import reference

# The sizes around which the kernels change their path, and odd numbers of inputs: the last pair has one only.
ROWS = st.one_of(st.integers(1, 40), st.sampled_from([95, 96, 97, 193]))
DEPTHS = st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 513]))
DRAWN = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _rounding(weight: torch.Tensor) -> torch.Tensor:
    packed = ops.pack_linear(weight)
    ops.round_inputs_(packed)
    return packed


@DRAWN
@given(m=ROWS, k=DEPTHS, n=st.integers(1, 200), biased=st.booleans())
def test_inputs_are_rounded_and_rows_ignore_their_neighbours(
    isa: str, m: int, k: int, n: int, biased: bool
) -> None:
    x, weight = torch.randn(m, k), torch.randn(n, k).bfloat16()
    bias = torch.randn(n) if biased else None
    packed = _rounding(weight)
    out = ops.packed_linear(x, packed, n, bias)
    expected = reference.packed_linear(x.bfloat16().float(), weight, bias)
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=1e-4)
    rows = [ops.packed_linear(row, packed, n, bias) for row in x.split(1)]
    assert torch.equal(out, torch.cat(rows))


@DRAWN
@given(m=ROWS, k=DEPTHS, n=st.integers(1, 70))
def test_a_gated_product_rounds_if_both_matrices_do(isa: str, m: int, k: int, n: int) -> None:
    x, (gate, up) = torch.randn(m, k), torch.randn(2, n, k).bfloat16()
    rounds = [_rounding(weight) for weight in (gate, up)]
    plain = [ops.pack_linear(weight) for weight in (gate, up)]
    out = ops.packed_gated_linear(x, *rounds, n, "silu")
    expected = reference.packed_gated_linear(x.bfloat16().float(), gate, up, "silu")
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=1e-4)
    exact = ops.packed_gated_linear(x, *plain, n, "silu")
    assert torch.equal(ops.packed_gated_linear(x, rounds[0], plain[1], n, "silu"), exact)
    assert torch.equal(ops.packed_gated_linear(x, plain[0], rounds[1], n, "silu"), exact)
    wide = ops.pack_linear(up.float())
    mixed = ops.packed_gated_linear(x, rounds[0], wide, n, "silu")
    assert torch.equal(mixed, exact)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 300, 1000), (7, 33, 90), (200, 64, 48)])
def test_threads_do_not_change_the_bits(m: int, k: int, n: int) -> None:
    x, packed = torch.randn(m, k), _rounding(torch.randn(n, k).bfloat16())
    expected = ops.packed_linear(x, packed, n)
    torch.set_num_threads(3)
    assert torch.equal(ops.packed_linear(x, packed, n), expected)


def test_nan_and_infinity_stay_in_their_row(isa: str) -> None:
    x, packed = torch.randn(5, 40), _rounding(torch.randn(20, 40).bfloat16())
    clean = ops.packed_linear(x, packed, 20)
    x[1, 39], x[3, 0] = torch.nan, torch.inf
    out = ops.packed_linear(x, packed, 20)
    assert not out[[1, 3]].isfinite().any()
    assert torch.equal(out[[0, 2, 4]], clean[[0, 2, 4]])


def test_the_weights_stay_as_they_are() -> None:
    weight = torch.randn(20, 33).bfloat16()
    packed = _rounding(weight)
    assert torch.equal(ops.unpack_linear(packed), weight.float())
    assert torch.equal(ops.packed_rows(packed, torch.tensor([3])), weight[[3]].float())


def test_only_bfloat16_can_be_rounded() -> None:
    with pytest.raises(RuntimeError, match="packed is a F16 matrix, want BF16"):
        ops.round_inputs_(ops.pack_linear(torch.randn(4, 4).half()))
    with pytest.raises(RuntimeError, match="not a packed matrix"):
        ops.round_inputs_(torch.zeros(80, dtype=torch.uint8))
