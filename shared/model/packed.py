"""Tokens of several sequences in one pass, without padding.

All tokens stand in one row [1, T], sequence after sequence. Linear layers, norms and rotary tables see tokens with explicit
positions; only attention has to know which sequence a token belongs to. It works span by span, each over its sequence's own
cache, so what a sequence computes does not depend on its company. Masks come from the model's own mask function, asked once
per span, which keeps windows and chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shared.model.cache import LengthlessCache, SlotCache
from shared.model.substitution.packing import PackedOffset, PackedStates, Span
from shared.ops.layer import Slots


@dataclass(frozen=True)
class Segment:
    """`num_tokens` tokens of one sequence at positions [base, base + num_tokens), for its own cache of one row."""

    cache: SlotCache
    base: int
    num_tokens: int


class PackedCache(LengthlessCache):
    """The segments' caches, as transformers sees one."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Raises `InvalidInput` where positions do not fit a segment's cache."""
        super().__init__()
        for segment in segments:
            segment.cache.begin(segment.base, segment.num_tokens)
        self._caches = tuple(segment.cache for segment in segments)
        self._spans = tuple(Span(segment.base, segment.num_tokens) for segment in segments)
        self._offset = PackedOffset(self._spans)
        self._bases = [span.base for span in self._spans]
        self._counts = [span.num_tokens for span in self._spans]
        self._num_tokens = sum(self._counts)

    def update(  # type: ignore[override]  # our attention takes what transformers only hands on
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[PackedStates, PackedStates]:
        """Keys and values [1, Hkv, T, Dh] beside the slots they belong in; our attention writes them there."""
        stores = [cache.stores(key_states, value_states, layer_idx) for cache in self._caches]
        return (
            PackedStates(key_states, tuple(keys for keys, _ in stores), self._spans),
            PackedStates(value_states, tuple(values for _, values in stores), self._spans),
        )

    def slots(self, keys: Tensor, values: Tensor, layer_idx: int) -> Slots:
        """The segments' stores of a layer and where in them their tokens belong: see `SlotCache.slots`."""
        stores = [cache.stores(keys, values, layer_idx) for cache in self._caches]
        return Slots(
            [keys for keys, _ in stores],
            [values for _, values in stores],
            self._bases,
            self._counts,
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._offset

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self._num_tokens, 0
