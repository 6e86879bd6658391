"""Our mask and attention functions, called as transformers calls them."""

import pytest
import torch
from torch import Tensor, nn

from shared import ops
from shared.model.substitution.attention import attention, attention_mask
from shared.model.substitution.ragged import RaggedMask, RaggedStates, Span


def _mask(q: int, kv: int, **changes: object) -> Tensor | None:
    return attention_mask(1, q, kv, **{"q_offset": kv - q, **changes})


def test_masks_are_left_out_only_where_plainly_causal() -> None:
    assert _mask(3, 9) is None
    assert _mask(3, 9, attention_mask=torch.ones(1, 9, dtype=torch.bool)) is None
    assert _mask(3, 9, local_size=10) is None
    hidden = torch.tensor([[False, True, True]])
    for changes in (
        {"q_offset": 0},
        {"kv_offset": 2},
        {"local_size": 9},
        {"allow_is_causal_skip": False},
        {"attention_mask": torch.nn.functional.pad(hidden, (0, 6), value=True)},
        {"attention_mask": torch.ones(1, 8, dtype=torch.bool)},
        {"q_offset": torch.tensor(6)},
    ):
        mask = _mask(3, 9, **changes)
        assert mask.dtype == torch.bool
        assert mask.shape == (1, 1, 3, 9)


def test_attention_takes_additive_masks_that_hide_and_refuses_the_rest() -> None:
    module, q, (k, v) = nn.Module(), torch.randn(1, 2, 3, 8), torch.randn(2, 1, 1, 5, 8).unbind()
    visible = torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2)
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    out, weights = attention(module, q, k, v, additive)
    assert weights is None
    assert torch.equal(out, ops.contiguous_attention(q, k, v, 5))
    with pytest.raises(NotImplementedError, match="not biases"):
        attention(module, q, k, v, additive / 1e38)
    for refused in ({"position_bias": q}, {"dropout": 0.1}, {"output_attentions": True}):
        with pytest.raises(NotImplementedError, match=next(iter(refused))):
            attention(module, q, k, v, None, **refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_are_passed_on_in_their_own_dtype_and_as_parameters(dtype: torch.dtype) -> None:
    module, q, (k, v) = nn.Module(), torch.randn(1, 2, 3, 8), torch.randn(2, 1, 1, 5, 8).unbind()
    sinks = nn.Parameter(torch.tensor([0.3, -1.7]).to(dtype))
    wanted = ops.contiguous_attention(q, k, v, 5, sinks=sinks.detach().float())
    assert not torch.equal(wanted, ops.contiguous_attention(q, k, v, 5))
    with torch.no_grad():
        assert torch.equal(attention(module, q, k, v, None, s_aux=sinks)[0], wanted)
        span = Span(2, 5)
        states = [RaggedStates(x[:, :, 2:], (x.clone(),), (span,)) for x in (k, v)]
        mask = RaggedMask((torch.empty(0, dtype=torch.bool),))
        assert torch.equal(attention(module, q, *states, mask, s_aux=sinks)[0], wanted)
