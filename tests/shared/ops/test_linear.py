import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import ops
from shared.ops import reference

# The sizes around which the kernels change their path: tiles of 1 to 12 rows, panels of 16 columns, depth blocks of
# 256, row chunks of 96.
ROWS = st.one_of(st.integers(1, 40), st.sampled_from([95, 96, 97, 193]))
DEPTHS = st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 513]))
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([96, 192, 200]))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DRAWN = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _row_by_row(run, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([run(x[row : row + 1]) for row in range(x.shape[0])])


@DRAWN
@given(n=WIDTHS, k=DEPTHS, transposed=st.booleans(), dtype=st.sampled_from(DTYPES))
def test_packing_keeps_every_weight(n: int, k: int, transposed: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(k, n).T if transposed else torch.randn(n, k)).to(dtype)
    packed = ops.pack_linear(weight)
    assert torch.equal(ops.unpack_linear(packed), weight.float())
    indices = torch.randint(n, (2, 3))
    assert torch.equal(ops.packed_rows(packed, indices), weight.float()[indices])


@DRAWN
@given(m=ROWS, k=DEPTHS, n=WIDTHS, biased=st.booleans())
def test_linear_agrees_with_pytorch_and_ignores_its_neighbours(isa: str, m: int, k: int, n: int, biased: bool) -> None:
    x, weight = torch.randn(m, k), torch.randn(n, k)
    bias = torch.randn(n) if biased else None
    packed = ops.pack_linear(weight)
    out = ops.packed_linear(x, packed, n, bias)
    expected = reference.packed_linear(x, weight, bias)
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(out, _row_by_row(lambda row: ops.packed_linear(row, packed, n, bias), x))


@DRAWN
@given(m=ROWS, k=DEPTHS, n=WIDTHS, activation=st.sampled_from(["silu", "gelu_tanh"]), biased=st.booleans())
def test_gated_linear_agrees_with_its_reference_and_ignores_its_neighbours(
    isa: str, m: int, k: int, n: int, activation: str, biased: bool
) -> None:
    x, gate, up = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n, k)
    bias = torch.randn(2 * n) if biased else None
    packed = ops.pack_linear(gate), ops.pack_linear(up)
    out = ops.packed_gated_linear(x, *packed, n, activation, bias)
    expected = reference.packed_gated_linear(x, gate, up, activation, bias)
    torch.testing.assert_close(out, expected, atol=5e-4, rtol=1e-4)
    run = lambda row: ops.packed_gated_linear(row, *packed, n, activation, bias)  # noqa: E731
    assert torch.equal(out, _row_by_row(run, x))


def test_activations_hold_over_the_whole_range_of_inputs(isa: str) -> None:
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.linspace(-0.3, 0.3, 601)])[:, None]
    packed = ops.pack_linear(torch.ones(1, 1)), ops.pack_linear(torch.zeros(1, 1))
    bias = torch.tensor([0.0, 1.0])
    for activation, expected in (("silu", F.silu(x)), ("gelu_tanh", F.gelu(x, approximate="tanh"))):
        out = ops.packed_gated_linear(x, *packed, 1, activation, bias)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 576, 1536), (8, 576, 1536), (300, 576, 192), (40, 1536, 576)])
def test_linear_has_the_same_bits_for_any_number_of_threads(m: int, k: int, n: int) -> None:
    x, packed = torch.randn(m, k), ops.pack_linear(torch.randn(n, k))
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(ops.packed_linear(x, packed, n))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_leading_dimensions_and_strides_of_x() -> None:
    packed = ops.pack_linear(torch.randn(20, 12))
    x = torch.randn(5, 3, 24)[..., ::2].transpose(0, 1)
    out = ops.packed_linear(x, packed, 20)
    assert out.shape == (3, 5, 20)
    assert torch.equal(out, ops.packed_linear(x.contiguous().view(15, 12), packed, 20).view(3, 5, 20))
    assert ops.packed_linear(torch.randn(12), packed, 20).shape == (20,)


@pytest.mark.parametrize(("shape", "n"), [((0, 8), 5), ((2, 0, 8), 5), ((3, 8), 0)])
def test_empty_tensors(shape: tuple[int, ...], n: int) -> None:
    out = ops.packed_linear(torch.randn(shape), ops.pack_linear(torch.randn(n, 8)), n)
    assert out.shape == (*shape[:-1], n)


def test_no_inputs_at_all_leave_the_bias() -> None:
    packed = ops.pack_linear(torch.empty(5, 0))
    assert torch.equal(ops.packed_linear(torch.empty(3, 0), packed, 5, torch.ones(5)), torch.ones(3, 5))


def test_nan_and_infinity_stay_in_their_row() -> None:
    x = torch.randn(8, 40)
    x[3, 7], x[5, 0] = float("nan"), float("inf")
    out = ops.packed_linear(x, ops.pack_linear(torch.rand(30, 40) + 0.1), 30)
    assert out[3].isnan().all()
    assert out[5].isinf().all()
    assert out[[0, 1, 2, 4, 6, 7]].isfinite().all()


@pytest.mark.parametrize(
    ("x", "out_features", "bias", "message"),
    [
        (torch.randn(3, 8).double(), 20, None, "x must be float32"),
        (torch.randn(3, 9), 20, None, r"a matrix \[20, 8\], want \[20, 9\]"),
        (torch.randn(3, 8), 33, None, r"a matrix \[20, 8\], want \[33, 8\]"),
        (torch.randn(3, 8), 20, torch.randn(19), r"bias .* \[20\]"),
        (torch.tensor(1.0), 20, None, "at least 1 dimension"),
    ],
)
def test_wrong_arguments_are_named(x: torch.Tensor, out_features: int, bias: torch.Tensor | None, message: str) -> None:
    packed = ops.pack_linear(torch.randn(20, 8))
    with pytest.raises(RuntimeError, match=message):
        ops.packed_linear(x, packed, out_features, bias)


def test_wrong_weights_and_activations_are_named() -> None:
    with pytest.raises(RuntimeError, match="2 dimensions"):
        ops.pack_linear(torch.randn(3))
    with pytest.raises(RuntimeError, match="float32, float16 or bfloat16"):
        ops.pack_linear(torch.randn(3, 3).double())
    packed = ops.pack_linear(torch.randn(5, 3))
    with pytest.raises(RuntimeError, match="activation is 'tanh'"):
        ops.packed_gated_linear(torch.randn(1, 3), packed, packed, 5, "tanh")
    other = ops.pack_linear(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=r"up is a matrix \[4, 3\]"):
        ops.packed_gated_linear(torch.randn(1, 3), packed, other, 5, "silu")


def test_an_input_that_asks_for_a_gradient_is_refused() -> None:
    packed = ops.pack_linear(torch.randn(3, 3))
    with torch.enable_grad(), pytest.raises(ValueError, match="no gradient"):
        ops.packed_linear(torch.randn(1, 3, requires_grad=True), packed, 3)
