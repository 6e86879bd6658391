"""`paged_attention` as an attention implementation of Hugging Face transformers, under the name "neap_paged".

For passes over tokens of any sequences in one row [1, T]. Transformers asks for a mask and hands it, unseen, to the attention of
each layer: what it gets here is a `PagedMask`, which says how far back a layer looks and where its keys and values are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from shared.model.substitution.attention import refuse_unserved
from shared.ops.library import load
from shared.ops.paged import paged_attention

NAME = "neap_paged"


class PagedOffset(int):
    """What transformers is told the first query's position is: 0; positions are the tokens' own.

    With `checks`, the mask function proves that the mask it stands for is causal or a sliding window. That reads tensors on the
    host, so not while a pass is recorded.
    """

    checks: bool

    def __new__(cls, checks: bool) -> "PagedOffset":
        offset = super().__new__(cls, 0)
        offset.checks = checks
        return offset


class LayerPages:
    """One layer's pool and a pass' tokens in it: the tensors that `paged_attention` takes after q, k and v."""

    def __init__(
        self, keys: Tensor, values: Tensor, pages: Tensor, rows: Tensor, positions: Tensor
    ) -> None:
        self.keys, self.values, self.pages = keys, values, pages
        self.rows, self.positions = rows, positions


class PagedMask:
    """How many positions a query sees at most, its own included (0: all), and from `at` on, where."""

    def __init__(self, window: int, layer: LayerPages | None = None) -> None:
        self.window = window
        self.layer = layer

    def at(self, layer: LayerPages) -> "PagedMask":
        return PagedMask(self.window, layer)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> PagedMask:
    """The mark of a causal mask or a sliding window. Raises `NotImplementedError` for any other, and for passes without pages."""
    if not isinstance(q_offset, PagedOffset) or attention_mask is not None:
        raise NotImplementedError(f"attention {NAME!r} serves paged passes only")
    window = local_size or 0
    if q_offset.checks and not _is_window(mask_function, window):
        raise NotImplementedError(f"attention {NAME!r} knows causal masks and sliding windows only")
    return PagedMask(window)


def _is_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Whether queries see what comes before them, or its last `window` positions, at every edge there may be."""
    around = {0, 1, 2, 3, 7, 64, 4095, 4096, 8192, 65536}
    around |= {times * window + near for times in range(4) for near in (-2, -1, 0, 1, 2)}
    at = torch.tensor(sorted(position for position in around if position >= 0))
    queries, keys, zero = at[:, None], at[None, :], torch.tensor(0)
    visible = (keys <= queries) & ((queries - keys < window) if window else torch.tensor(True))
    return torch.equal(mask_function(zero, zero, queries, keys).expand_as(visible), visible)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PagedMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] of the pass' tokens alone -> ([1, T, Hq, Dv], no weights).

    Raises `NotImplementedError` for attention sinks, biases, dropout, requests for the weights, and passes without pages.
    """
    refuse_unserved(NAME, dropout, kwargs)
    layer = attention_mask.layer if isinstance(attention_mask, PagedMask) else None
    if layer is None:
        raise NotImplementedError(f"attention {NAME!r} was given another mask than its own")
    out = paged_attention(
        _by_token(query),
        _by_token(key),
        _by_token(value),
        layer.keys,
        layer.values,
        layer.pages,
        layer.rows,
        layer.positions,
        scaling,
        softcap or 0.0,
        attention_mask.window,
    )
    return out[None], None


def _by_token(states: Tensor) -> Tensor:
    """[1, H, T, D] -> a view [T, H, D]."""
    rows = states[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def register() -> None:
    """Makes "neap_paged" known to transformers. Changes no model by itself. Raises `PreconditionFailed` without the library."""
    load()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
