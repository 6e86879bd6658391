"""Ragged batches: tokens of several sequences in one pass, without padding.

All tokens stand in one row [1, T], sequence after sequence. Linear layers, norms and rotary tables get tokens with
explicit positions; only attention has to know which sequence a token belongs to. It processes one sequence after
another, each over its own cache, so the results of a sequence do not depend on the other sequences. The masks come from
the model's own mask function, which is called once per sequence, so sliding windows and chunks are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.model.cache import KVCache, LengthlessCache, as_contiguous
from shared.model.substitution.ragged import RaggedOffset, RaggedStates, Span
from shared.ops.layer import LayerKV


@dataclass(frozen=True)
class RaggedSequence:
    """One sequence of a ragged batch: `num_tokens` tokens at positions from `base` on of its own cache.

    `read_length`: the first tokens of the sequence that `generate` would have read in one pass; it reads the others one
    by one. See `shared.model.regimes`. None: all up to the last of this pass.
    """

    cache: KVCache
    base: int
    num_tokens: int
    read_length: int | None = None

    @property
    def span(self) -> Span:
        start = self.cache.origin + self.base
        return Span(start, start + self.num_tokens, self.cache.origin)

    @property
    def lengths(self) -> list[int]:
        """Per token, how long the sequence was when `generate` would have run it."""
        start, end = self.span.start, self.span.end
        read = end if self.read_length is None else self.read_length
        return [max(read, length) for length in range(start + 1, end + 1)]


class RaggedCache(LengthlessCache):
    """The contiguous caches of a ragged batch as one transformers cache."""

    def __init__(self, sequences: Sequence[RaggedSequence]) -> None:
        """Raises `InvalidInput` (reason CACHE_CAPACITY) if positions do not fit a sequence's cache."""
        self.spans = tuple(sequence.span for sequence in sequences)
        self._caches = [as_contiguous(sequence.cache) for sequence in sequences]
        self._bases = [sequence.base for sequence in sequences]
        self._counts = [sequence.num_tokens for sequence in sequences]
        for cache, base, count in zip(self._caches, self._bases, self._counts, strict=True):
            cache.begin(base, count)
        super().__init__(RaggedOffset(self.spans))

    def update(  # type: ignore[override]  # transformers passes the result to our attention without looking inside
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[RaggedStates, RaggedStates]:
        """The new keys and values [1, Hkv, T, Dh] together with the tensors that they belong in.
        Our attention writes them there."""
        tensors = [cache.layer_tensors(key_states, value_states, layer_idx) for cache in self._caches]
        return (
            RaggedStates(key_states, tuple(keys for keys, _ in tensors), self.spans),
            RaggedStates(value_states, tuple(values for _, values in tensors), self.spans),
        )

    def seen(self, layer_idx: int) -> tuple[RaggedStates, RaggedStates]:
        """What `update` returned when a layer ran over the tokens of this pass, in another one."""
        return (
            self._written([cache.keys[layer_idx] for cache in self._caches]),
            self._written([cache.values[layer_idx] for cache in self._caches]),
        )

    def _written(self, tensors: Sequence[Tensor]) -> RaggedStates:
        fresh = [
            tensor[:, :, span.base : span.base + span.num_tokens]
            for tensor, span in zip(tensors, self.spans, strict=True)
        ]
        return RaggedStates(torch.cat(fresh, 2), tuple(tensors), self.spans)

    def layers_kv(self, likes: Sequence[tuple[Tensor, Tensor]], layers: tuple[int, ...]) -> LayerKV:
        """The tensors of layers per span, and the positions in them that the pass will write: see
        `ContiguousCache.layers_kv`."""
        tables = [cache.tables(likes, layers) for cache in self._caches]
        return LayerKV(
            [key_table for [key_table], _ in tables],
            [value_table for _, [value_table] in tables],
            self._bases,
            self._counts,
        )
