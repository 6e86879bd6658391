"""`contiguous_attention` as an attention implementation of Hugging Face transformers, under the name "neap".

Works with every cache whose `update` returns [B, Hkv, S, D], the keys or values that the layer may see: preallocated or
growing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from shared import ops
from shared.model.substitution.ragged import RaggedMask, RaggedOffset, RaggedStates, Span

NAME = "neap"

# Arguments that would change the result and are not implemented. A value other than None is refused.
_REFUSED = ("position_bias", "head_mask", "cache")


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | RaggedMask | None:
    """The mask of one pass: bool [B, 1, Q, S], or None if it is causal with the queries at the end.
    A `RaggedMask` for a ragged batch.

    Transformers calls this once per pass and kind of layer. A window or chunk of `local_size` keys has no effect on
    fewer keys, so such a mask counts as causal, too.
    """
    if isinstance(q_offset, RaggedOffset):
        return ragged_mask(
            q_offset.spans,
            mask_function=mask_function,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            **kwargs,
        )
    plain = (
        allow_is_causal_skip
        and kv_offset == 0
        # It is a tensor if the cache is a static one of transformers.
        and type(q_offset) is int
        and q_offset + q_length == kv_length
        and (local_size is None or kv_length < local_size)
        and (attention_mask is None or _hides_no_position(attention_mask, kv_length))
    )
    if plain:
        return None
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        **kwargs,
    )
    return mask


def ragged_mask(spans: Sequence[Span], **kwargs: Any) -> RaggedMask:
    """The masks of one pass over `spans`. `kwargs`: those of `attention_mask` behind the padding."""
    nothing = torch.empty(0, dtype=torch.bool)
    masks = []
    for span in spans:
        mask = attention_mask(
            1, span.num_tokens, span.base + span.num_tokens, q_offset=span.start, kv_offset=span.origin, **kwargs
        )
        assert not isinstance(mask, RaggedMask)
        masks.append(nothing if mask is None else mask)
    return RaggedMask(tuple(masks))


def _hides_no_position(padding: Tensor, kv_length: int) -> bool:
    return padding.shape[-1] >= kv_length and bool(padding[:, :kv_length].all())


def _as_bool(mask: Tensor) -> Tensor:
    """Converts an additive mask of zeros and the dtype's minimum to bool. Callers of a model may pass such 4-D masks.

    Raises `NotImplementedError` for other numbers.
    """
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise NotImplementedError("attention 'neap' supports masks that show or hide a position, but not biases")
    return visible


def refuse_unsupported(name: str, dropout: float, kwargs: Mapping[str, Any]) -> None:
    """Raises `NotImplementedError` if attention `name` is asked for something that it does not compute."""
    refused = [asked for asked in _REFUSED if kwargs.get(asked) is not None]
    if dropout:
        refused.append("dropout")
    if kwargs.get("output_attentions"):
        refused.append("output_attentions")
    if refused:
        raise NotImplementedError(f"attention {name!r} does not support {', '.join(refused)}")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | RaggedStates,
    value: Tensor | RaggedStates,
    attention_mask: Tensor | RaggedMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, Q, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv] -> ([B, Q, Hq, Dv], None). `s_aux` [Hq]: sinks.

    Raises `NotImplementedError` for biases, dropout and requests for the weights.
    """
    refuse_unsupported(NAME, dropout, kwargs)
    sinks = None if s_aux is None else s_aux.float()
    if isinstance(key, RaggedStates) or isinstance(value, RaggedStates):
        assert isinstance(key, RaggedStates)
        assert isinstance(value, RaggedStates)
        return _ragged_attention(query, key, value, attention_mask, scaling, softcap, sinks), None
    assert not isinstance(attention_mask, RaggedMask)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    else:
        causal, attention_mask = False, _as_bool(attention_mask)
    key, value = _with_contiguous_rows(key), _with_contiguous_rows(value)
    out = ops.contiguous_attention(
        query, key, value, key.shape[2], attention_mask, bool(causal), scaling, softcap, sinks
    )
    return out, None


def _with_contiguous_rows(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def _ragged_attention(
    query: Tensor,
    key: RaggedStates,
    value: RaggedStates,
    mask: Tensor | RaggedMask | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    if not isinstance(mask, RaggedMask):
        raise NotImplementedError("attention 'neap' needs a mask that it made itself")
    return ops.ragged_contiguous_attention(
        query,
        _with_contiguous_rows(key.fresh),
        _with_contiguous_rows(value.fresh),
        key.caches,
        value.caches,
        [span.base for span in key.spans],
        [span.num_tokens for span in key.spans],
        mask.masks,
        scaling,
        softcap,
        sinks,
    )


@contextmanager
def observed(see: Callable[..., None]) -> Iterator[None]:
    """Within it, each call of our attention first calls `see` with the same arguments."""

    def observing(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        see(*args, **kwargs)
        return attention(*args, **kwargs)

    AttentionInterface.register(NAME, observing)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attention)


@contextmanager
def masks_made_by(make: Callable[..., object]) -> Iterator[None]:
    """Within it, `make` is called in place of our mask function."""
    AttentionMaskInterface.register(NAME, make)
    try:
        yield
    finally:
        AttentionMaskInterface.register(NAME, attention_mask)


def register() -> None:
    """Registers "neap" with transformers. Changes no model by itself."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
