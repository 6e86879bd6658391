import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from shared import ops
from shared.model.substitution.linear import ACTIVATIONS
from shared.ops import reference

DRAWN = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@DRAWN
@given(rows=st.integers(1, 9), width=st.integers(1, 200), offset=st.sampled_from([0.0, 1.0]))
def test_rms_norm_agrees_with_its_reference_row_by_row(isa: str, rows: int, width: int, offset: float) -> None:
    x, weight = torch.randn(2, rows, width), torch.randn(width)
    out = ops.rms_norm(x, weight, 1e-5, offset)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5, offset), atol=1e-6, rtol=1e-5)
    assert all(torch.equal(out[:, i : i + 1], ops.rms_norm(x[:, i : i + 1], weight, 1e-5, offset)) for i in range(rows))


@DRAWN
@given(rows=st.integers(1, 9), width=st.integers(8, 200), shift=st.sampled_from([0.0, 3.0]))
def test_layer_norm_agrees_with_its_reference_row_by_row(isa: str, rows: int, width: int, shift: float) -> None:
    x, (weight, bias) = torch.randn(2, rows, width) + shift, torch.randn(2, width).unbind()
    out = ops.layer_norm(x, weight, bias, 1e-5)
    expected = reference.layer_norm(x.double(), weight.double(), bias.double(), 1e-5).float()
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(out[:, i : i + 1], ops.layer_norm(x[:, i : i + 1], weight, bias, 1e-5)) for i in range(rows))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_agree_with_their_reference_number_by_number(isa: str, activation: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 3001), torch.tensor([0.0, -1e-30, 1e4, -1e4, float("nan"), float("inf")])])
    out = ops.activate(x, activation)
    expected = reference.activate(x.double(), activation).float()
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6, equal_nan=True)
    for part in x.split([1, 5, 2000, 1001]):
        begin = part.storage_offset()
        assert torch.equal(ops.activate(part, activation).nan_to_num(), out[begin : begin + len(part)].nan_to_num())


def test_rms_norm_agrees_with_hugging_face() -> None:
    x = torch.randn(3, 576) * 1e-3  # small enough for eps to matter
    llama, gemma = LlamaRMSNorm(576, eps=1e-5), Gemma3RMSNorm(576, eps=1e-6)
    gemma.weight.copy_(torch.randn(576))
    llama.weight.copy_(torch.randn(576))
    torch.testing.assert_close(ops.rms_norm(x, llama.weight, 1e-5), llama(x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ops.rms_norm(x, gemma.weight, 1e-6, 1.0), gemma(x), atol=1e-6, rtol=1e-5)


def test_rms_norm_of_zeros_and_of_nothing() -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 5), torch.ones(5), 1e-6), torch.zeros(2, 5))
    assert ops.rms_norm(torch.empty(0, 5), torch.ones(5), 1e-6).shape == (0, 5)


@DRAWN
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 5),
    length=st.integers(1, 6),
    half=st.integers(1, 40),
    shared=st.booleans(),
)
def test_rotary_has_the_bits_of_hugging_face(
    isa: str, batch: int, heads: int, length: int, half: int, shared: bool
) -> None:
    q = torch.randn(batch, length, heads, 2 * half).transpose(1, 2)
    k = torch.randn(batch, 1, length, 2 * half + 3)[..., : 2 * half]
    cos, sin = torch.randn(2, 1 if shared else batch, length, 2 * half).unbind()
    for actual, wanted, spec in zip(
        ops.rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), reference.rotary(q, k, cos, sin), strict=True
    ):
        assert torch.equal(actual, wanted)
        assert torch.equal(actual, spec)
        assert actual.is_contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cos": torch.randn(1, 3, 6), "sin": torch.randn(1, 3, 6)}, r"cos and sin \[B or 1, 3, 8\]"),
        ({"sin": torch.randn(1, 3, 6)}, "differ in shape"),
        ({"cos": torch.randn(3, 3, 8), "sin": torch.randn(3, 3, 8)}, "3 rows for a batch of 2"),
        ({"q": torch.randn(2, 4, 3, 8).double()}, "q must be float32"),
        ({"q": torch.randn(2, 4, 3, 16)[..., ::2]}, "last dimension of q"),
        ({"k": torch.randn(4, 3, 8)}, "4 dimensions"),
    ],
)
def test_wrong_rotary_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "q": torch.randn(2, 4, 3, 8),
        "k": torch.randn(2, 2, 3, 8),
        "cos": torch.randn(1, 3, 8),
        "sin": torch.randn(1, 3, 8),
    }
    with pytest.raises(RuntimeError, match=message):
        ops.rotary(**{**arguments, **change})


def test_wrong_norm_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"weight must be contiguous with shape \[5\]"):
        ops.rms_norm(torch.randn(2, 5), torch.ones(4), 1e-6)
    with pytest.raises(RuntimeError, match="eps is negative"):
        ops.rms_norm(torch.randn(2, 5), torch.ones(5), -1.0)
    with pytest.raises(RuntimeError, match=r"layer_norm: bias must be contiguous with shape \[5\]"):
        ops.layer_norm(torch.randn(2, 5), torch.ones(5), torch.ones(4), 1e-6)
    with pytest.raises(RuntimeError, match="activation is 'swish'"):
        ops.activate(torch.randn(2, 5), "swish")
