"""Matmuls that round their inputs: to bfloat16 with weights in bfloat16, to 8 bits with GGUF's blocks."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import ops
from shared.ops import reference
from shared.ops.build import ISA_FLAGS, WITHIN
from tests.shared.ops.test_formats import BLOCKS, KINDS, blocks_of, dequantised_blocks, drawn_blocks

# The sizes around which the kernels change their path, and odd numbers of inputs: the last pair has one only.
ROWS = st.one_of(st.integers(1, 40), st.sampled_from([95, 96, 97, 193]))
DEPTHS = st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 513]))
ROW_COUNTS = (*range(1, 34), 96, 97)
DRAWN = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _rounding(weight: torch.Tensor) -> torch.Tensor:
    packed = ops.pack_linear(weight)
    ops.round_inputs_(packed)
    return packed


@DRAWN
@given(m=ROWS, k=DEPTHS, n=st.integers(1, 200), biased=st.booleans())
def test_inputs_are_rounded_and_rows_ignore_their_neighbours(isa: str, m: int, k: int, n: int, biased: bool) -> None:
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
def test_a_gated_matmul_rounds_if_both_matrices_do(isa: str, m: int, k: int, n: int) -> None:
    x, (gate, up) = torch.randn(m, k), torch.randn(2, n, k).bfloat16()
    rounds = [_rounding(weight) for weight in (gate, up)]
    plain = [ops.pack_linear(weight) for weight in (gate, up)]
    out = ops.packed_gated_linear(x, *rounds, n, "silu")
    expected = reference.packed_gated_linear(x.bfloat16().float(), gate, up, "silu")
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=1e-4)
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


def _rounding_blocks(kind: str, blocks: np.ndarray, inputs: int) -> torch.Tensor:
    packed = ops.pack_blocks(torch.from_numpy(blocks), kind, inputs)
    ops.round_inputs_(packed)
    return packed


def _rounded_to_bytes(x: torch.Tensor) -> torch.Tensor:
    """x in float64, 32 inputs at a time rounded to 127 steps of the largest. Ties to even, as the kernels."""
    groups = x.reshape(len(x), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    # Not 127.0 / largest, which is the product with a rounded reciprocal.
    steps = (groups * (torch.tensor(127.0) / largest)).round()
    rounded = steps.double() * (largest / 127.0)
    return torch.where(largest > 1e-30, rounded, 0.0).reshape(x.shape)


@DRAWN
@given(m=ROWS, **BLOCKS)
def test_matmuls_with_blocks_round_inputs_to_bytes_and_rows_ignore_their_neighbours(
    isa: str, kind: str, m: int, n: int, num_blocks: int, seed: int
) -> None:
    blocks, inputs = drawn_blocks(kind, n, num_blocks, seed)
    packed = _rounding_blocks(kind, blocks, inputs)
    x = torch.randn(m, inputs, generator=torch.Generator().manual_seed(seed))
    x[0, :32], x[-1, 32:64] = 0.0, 1e-38
    out = ops.packed_linear(x, packed, n)
    weight = dequantised_blocks(kind, blocks).double()
    expected = _rounded_to_bytes(x) @ weight.T
    # Two large numbers may nearly cancel where quants have an offset.
    size = x.abs().double() @ weight.abs().T
    assert ((out - expected).abs() <= 1e-5 * size + 1e-6).all()
    rows = [ops.packed_linear(row, packed, n) for row in x.split(1)]
    assert torch.equal(out, torch.cat(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_matmuls_with_the_largest_quants_and_inputs_do_not_overflow(isa: str, kind: str) -> None:
    blocks, inputs = blocks_of(kind, 3, 2, seed=0)
    weight = dequantised_blocks(kind, blocks)
    x = weight.sign() * 3.0  # every product has one sign
    x[:, 0] *= 2.0
    out = ops.packed_linear(x, _rounding_blocks(kind, blocks, inputs), 3)
    expected = _rounded_to_bytes(x) @ weight.double().T
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_instruction_sets_give_the_same_matmuls_with_bytes(kind: str) -> None:
    """In tiles of every height, and of several equal ones."""
    blocks, inputs = blocks_of(kind, 40, 3, seed=1)
    packed, x = _rounding_blocks(kind, blocks, inputs), torch.randn(97, inputs)
    found = {}
    for isa in (*ISA_FLAGS, *WITHIN):
        with suppress(RuntimeError):
            ops.set_cpu_isa(isa)
            found[isa] = torch.cat([ops.packed_linear(x[:rows], packed, 40) for rows in ROW_COUNTS])
    ops.set_cpu_isa("auto")
    portable = found.pop("portable", None)  # all but portable add products in one rounding
    fused = list(found.values())
    size = x.abs() @ dequantised_blocks(kind, blocks).abs().float().T  # what a sum is rounded by goes with this
    sizes = torch.cat([size[:rows] for rows in ROW_COUNTS])
    for other in fused:
        assert torch.equal(other, fused[0])
        if portable is not None:
            torch.testing.assert_close(other / sizes, portable / sizes, rtol=1e-5, atol=1e-7)
            if kind == "Q4_K":
                torch.testing.assert_close(other[:15], portable[:15], rtol=1e-5, atol=1e-5)


def test_gates_of_several_formats_share_inputs_in_bytes(isa: str) -> None:
    n = 410  # more panels than one row reads of the gate before it reads those of `up`
    (gate, inputs), (up, _) = (blocks_of(kind, n, 3, seed=2) for kind in ("Q4_K", "Q6_K"))
    x = torch.randn(17, inputs)
    one, other = _rounding_blocks("Q4_K", gate, inputs), _rounding_blocks("Q6_K", up, inputs)
    out = ops.packed_gated_linear(x, one, other, n, "silu")
    gates, ups = (ops.packed_linear(x, packed, n) for packed in (one, other))
    torch.testing.assert_close(out, torch.nn.functional.silu(gates) * ups, rtol=1e-4, atol=1e-4)
    plain = ops.pack_linear(torch.randn(n, inputs))
    unrounded = ops.pack_blocks(torch.from_numpy(gate), "Q4_K", inputs)
    widened = ops.packed_gated_linear(x, one, plain, n, "silu")
    assert torch.equal(widened, ops.packed_gated_linear(x, unrounded, plain, n, "silu"))
    for whole, second in ((out, other), (widened, plain)):
        rows = [ops.packed_gated_linear(row, one, second, n, "silu") for row in x.split(1)]
        assert torch.equal(whole, torch.cat(rows))


def test_an_input_that_is_not_finite_spoils_its_row_alone(isa: str) -> None:
    blocks, inputs = blocks_of("Q6_K", 20, 1, seed=3)
    x, packed = torch.randn(19, inputs), _rounding_blocks("Q6_K", blocks, inputs)
    clean = ops.packed_linear(x, packed, 20)
    x[1, 39], x[3, 0] = torch.nan, torch.inf
    out = ops.packed_linear(x, packed, 20)
    assert not out[[1, 3]].isfinite().any()
    others = [0, 2, *range(4, 19)]
    assert torch.equal(out[others], clean[others])


def test_scales_that_are_not_finite_are_not_hidden(isa: str) -> None:
    blocks, inputs = blocks_of("Q4_0", 20, 2, seed=3)
    blocks[7, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    out = ops.packed_linear(torch.randn(2, inputs), _rounding_blocks("Q4_0", blocks, inputs), 20)
    assert not out[:, 7].isfinite().any()
    assert out[:, :7].isfinite().all()
    assert out[:, 8:].isfinite().all()


def test_float_weights_cannot_round_inputs() -> None:
    with pytest.raises(RuntimeError, match="packed is a F16 matrix, want BF16 or GGUF's blocks"):
        ops.round_inputs_(ops.pack_linear(torch.randn(4, 4).half()))
    with pytest.raises(RuntimeError, match="not a packed matrix"):
        ops.round_inputs_(torch.zeros(80, dtype=torch.uint8))
