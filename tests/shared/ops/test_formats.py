"""Weights in 16 bits and in GGUF's blocks give the bits of the same weights dequantised to float32."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import ops

DRAWN = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
ROWS = st.one_of(st.integers(1, 26), st.sampled_from([36, 37, 97]))


def blocks_of(kind: str, rows: int, num_blocks: int, seed: int) -> tuple[np.ndarray, int]:
    """Random blocks of a type with finite scales: uint8 [rows, bytes], and the number of inputs of a row."""
    inputs, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, num_blocks, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = rng.integers(110, 126, (rows, num_blocks))
        return blocks.reshape(rows, -1), num_blocks * inputs
    halves = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}.get(kind, 1)
    scales = rng.normal(0, 0.02, (rows, num_blocks, halves)).astype(np.float16).view(np.uint8)
    begin = size - 2 if kind == "Q6_K" else 0
    blocks[:, :, begin : begin + 2 * halves] = scales
    return blocks.reshape(rows, -1), num_blocks * inputs


# What `drawn_blocks` takes.
BLOCKS = {
    "kind": st.sampled_from(KINDS),
    "n": st.integers(1, 70),
    "num_blocks": st.integers(1, 18),
    "seed": st.integers(0, 1000),
}


def drawn_blocks(kind: str, n: int, num_blocks: int, seed: int) -> tuple[np.ndarray, int]:
    """`blocks_of` with fewer blocks if they are large."""
    return blocks_of(kind, n, num_blocks if kind[-1] != "K" else 1 + num_blocks % 3, seed)


def dequantised_blocks(kind: str, blocks: np.ndarray) -> torch.Tensor:
    """The weights by GGUF's own reference code."""
    return torch.from_numpy(dequantize(blocks, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_unpack_to_the_numbers_of_the_reference(isa: str, kind: str) -> None:
    blocks, inputs = blocks_of(kind, 37, 3, seed=0)
    packed = ops.pack_blocks(torch.from_numpy(blocks), kind, inputs)
    expected = dequantised_blocks(kind, blocks)
    assert torch.equal(ops.unpack_linear(packed), expected)
    # Rows 16 to 31 are a panel: once as a whole, once all but its first, once in another order.
    for rows in ([[0, 36], [17, 5]], [*range(14, 37), 5], [*range(17, 37)], [*range(31, 15, -1)]):
        indices = torch.tensor(rows)
        assert torch.equal(ops.packed_rows(packed, indices), expected[indices])


def test_each_exponent_of_mxfp4_scales_each_quant(isa: str) -> None:
    """Those below 2 scale by numbers that are not normal; the last ones make some numbers infinite."""
    blocks = np.full((256, 17), range(17), np.uint8) * 17
    blocks[:, 0] = range(256)
    packed = ops.pack_blocks(torch.from_numpy(blocks), "MXFP4", 32)
    assert torch.equal(ops.unpack_linear(packed), dequantised_blocks("MXFP4", blocks))


@DRAWN
@given(m=ROWS, **BLOCKS)
def test_matmuls_with_blocks_have_the_bits_of_the_dequantised_matrix(
    isa: str, kind: str, m: int, n: int, num_blocks: int, seed: int
) -> None:
    blocks, inputs = drawn_blocks(kind, n, num_blocks, seed)
    packed = ops.pack_blocks(torch.from_numpy(blocks), kind, inputs)
    x = torch.randn(m, inputs, generator=torch.Generator().manual_seed(seed))
    dequantised = ops.pack_linear(dequantised_blocks(kind, blocks))
    expected = ops.packed_linear(x, dequantised, n)
    assert torch.equal(ops.packed_linear(x, packed, n), expected)
    gated = ops.packed_gated_linear(x, packed, dequantised, n, "silu")
    assert torch.equal(gated, ops.packed_gated_linear(x, dequantised, packed, n, "silu"))


@DRAWN
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    m=ROWS,
    k=st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 513])),
    n=st.integers(1, 200),
)
def test_matmuls_with_16_bits_have_the_bits_of_the_dequantised_matrix(
    isa: str, dtype: torch.dtype, m: int, k: int, n: int
) -> None:
    x, weight = torch.randn(m, k), torch.randn(n, k).to(dtype)
    narrow, wide = ops.pack_linear(weight), ops.pack_linear(weight.float())
    assert (narrow.numel() - 64) * 2 * k <= (wide.numel() - 64) * (k + 1)
    assert torch.equal(ops.packed_linear(x, narrow, n), ops.packed_linear(x, wide, n))


def test_extreme_numbers_dequantise_exactly(isa: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(64, 1024)
        numbers = ops.unpack_linear(ops.pack_linear(bits))
        expected = bits.float()
        assert torch.equal(numbers.nan_to_num(7.5), expected.nan_to_num(7.5))
        assert torch.equal(numbers.isnan(), expected.isnan())


@pytest.mark.parametrize(
    ("kind", "shape", "inputs", "message"),
    [
        ("Q4_2", (2, 18), 32, "no format 'Q4_2'"),
        ("F32", (2, 18), 32, "no format 'F32'"),
        ("Q4_0", (2, 18), 33, "33 inputs do not divide into blocks of 32"),
        ("Q4_K", (2, 144), 128, "128 inputs do not divide into blocks of 256"),
        ("Q4_0", (2, 17), 32, "rows of 17 bytes, but 32 inputs in Q4_0 take 18"),
        ("Q4_0", (18,), 32, "want|must be contiguous uint8"),
    ],
)
def test_wrong_blocks_are_named(kind: str, shape: tuple, inputs: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.pack_blocks(torch.zeros(shape, dtype=torch.uint8), kind, inputs)


@pytest.mark.parametrize("byte", range(32))
def test_a_damaged_packed_matrix_is_refused(byte: int) -> None:
    packed = ops.pack_linear(torch.randn(20, 8).half())
    packed[byte] ^= 0xFF
    for call in (ops.unpack_linear, lambda p: ops.packed_linear(torch.randn(1, 8), p, 20)):
        with pytest.raises(RuntimeError, match=r"not a packed matrix|is damaged|is a matrix"):
            call(packed)


def test_a_truncated_packed_matrix_is_refused() -> None:
    packed = ops.pack_linear(torch.randn(20, 8))
    for length in (0, 63, 64, packed.numel() - 1):
        with pytest.raises(RuntimeError, match=r"not a packed matrix|is damaged"):
            ops.unpack_linear(packed[:length])
    with pytest.raises(RuntimeError, match="not a packed matrix"):
        ops.unpack_linear(packed.float())
    with pytest.raises(RuntimeError, match="outside"):
        ops.packed_rows(packed, torch.tensor([20]))
    with pytest.raises(RuntimeError, match="int64"):
        ops.packed_rows(packed, torch.tensor([2.0]))
