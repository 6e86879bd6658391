"""`paged_attention` as an attention implementation of Hugging Face transformers, under the name "neap_paged".

For ragged batches over paged KV: tokens of any sequences in one row [1, T]. Transformers asks for a mask and passes it
to the attention of each layer without looking inside. The mask here is a `PagedMask`: it says how far back a layer
looks and where its keys and values are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from shared.model.substitution.attention import refuse_unsupported
from shared.model.substitution.ragged import WHOLE
from shared.ops import load
from shared.ops.paged import paged_attention

NAME = "neap_paged"


class PagedOffset(int):
    """The position of the first query as transformers sees it: 0. Each token has a position of its own.

    With `checks`, the mask function verifies that the mask is causal or a sliding window. That reads tensors on the
    host, so it must not happen while a pass is recorded.
    """

    checks: bool

    def __new__(cls, checks: bool) -> "PagedOffset":
        offset = super().__new__(cls, 0)
        offset.checks = checks
        return offset


@dataclass(eq=False)
class LayerBlocks:
    """One layer's part of a block pool, and the tokens of a pass: the tensors that `paged_attention` takes after q, k
    and v.

    keys [P, Hkv, G, D], values [P, Hkv, G, Dv], block_tables [R, M] int64, table_indices and positions [T] int64: see
    `shared.ops.paged.paged_attention`.
    """

    keys: Tensor
    values: Tensor
    block_tables: Tensor
    table_indices: Tensor
    positions: Tensor


class PagedMask:
    """Stands for a mask: the number of last positions that a query sees, its own included, or 0 for all of them.

    `for_layer` adds where the layer's keys and values are.
    """

    def __init__(self, window: int, layer: LayerBlocks | None = None) -> None:
        self.window = window
        self.layer = layer

    def __getitem__(self, index: tuple[slice, ...]) -> "PagedMask":
        """Itself: see `WHOLE`."""
        assert all(each in WHOLE for each in index)
        return self

    def for_layer(self, layer: LayerBlocks) -> "PagedMask":
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
    """The `PagedMask` of a causal mask or a sliding window.

    Raises `NotImplementedError` for any other mask, and for passes that are not paged.
    """
    if not isinstance(q_offset, PagedOffset) or attention_mask is not None:
        raise NotImplementedError(f"attention {NAME!r} supports paged passes only")
    window = local_size or 0
    if q_offset.checks and not _is_window(mask_function, window):
        raise NotImplementedError(f"attention {NAME!r} supports causal masks and sliding windows only")
    return PagedMask(window)


def _is_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Whether each query sees all positions up to its own, or the last `window` of them.
    Tests positions around every likely edge."""
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
    """query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] of the pass' new tokens -> ([1, T, Hq, Dv], None).

    Raises `NotImplementedError` for biases, dropout, requests for the weights, and passes that are not paged.
    """
    sinks = kwargs.pop("s_aux", None)
    refuse_unsupported(NAME, dropout, kwargs)
    layer = attention_mask.layer if isinstance(attention_mask, PagedMask) else None
    if layer is None:
        raise NotImplementedError(f"attention {NAME!r} needs a mask that it made itself")
    out = paged_attention(
        _by_token(query),
        _by_token(key),
        _by_token(value),
        layer.keys,
        layer.values,
        layer.block_tables,
        layer.table_indices,
        layer.positions,
        scaling,
        softcap or 0.0,
        attention_mask.window,
        sinks,
    )
    return out[None], None


def _by_token(states: Tensor) -> Tensor:
    """[1, H, T, D] -> a view [T, H, D]."""
    by_token = states[0].transpose(0, 1)
    return by_token if by_token.stride(-1) == 1 else by_token.contiguous()


def register() -> None:
    """Registers "neap_paged" with transformers. Changes no model by itself.
    Raises `PreconditionFailed` without the library."""
    load()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
