"""Ragged batches: tokens of several sequences in one pass, without padding.

All tokens stand in one row [1, T], sequence after sequence. Linear layers, norms and rotary tables get tokens with
explicit positions; only attention has to know which sequence a token belongs to. It processes one sequence after
another, each over its own cache, so the results of a sequence do not depend on the other sequences. The masks come from
the model's own mask function, which is called once per sequence, so sliding windows and chunks are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from shared.model.cache import KVCache, LengthlessCache, as_contiguous
from shared.model.substitution.ragged import RaggedOffset, RaggedStates, Span
from shared.ops.layer import LayerKV


class Branch(NamedTuple):
    """Tokens at positions [base, base + num_tokens) beside other tokens of a pass at these positions."""

    base: int
    num_tokens: int


@dataclass(frozen=True)
class RaggedSequence:
    """One sequence of a ragged batch: `num_tokens` tokens at positions from `base` on of its own cache.

    The last of them are those of the `branches`, in order; the others are the trunk. A branch sees the positions before
    its base as the cache and the trunk have them, and itself. Its tokens are kept in the cache where they would stand
    in a trunk of `num_tokens` tokens.

    `read_length`: the first tokens of the sequence that `generate` would have read in one pass; it reads the others one
    by one. See `shared.model.regimes`. None: all up to the last of this pass.
    """

    cache: KVCache
    base: int
    num_tokens: int
    branches: tuple[Branch, ...] = ()
    read_length: int | None = None

    @property
    def spans(self) -> list[Span]:
        """The trunk, then the branches."""
        origin, in_branches = self.cache.origin, sum(branch.num_tokens for branch in self.branches)
        spans = [Span(self.base, self.num_tokens - in_branches, origin)]
        slot = spans[0].base + spans[0].num_tokens
        for base, num_tokens in self.branches:
            spans.append(Span(base, num_tokens, origin, slot - base))
            slot += num_tokens
        return spans

    @property
    def positions(self) -> list[int]:
        return [position for span in self.spans for position in range(span.base, span.base + span.num_tokens)]

    @property
    def lengths(self) -> list[int]:
        """Per token, how long the sequence was when `generate` would have run it."""
        ends = [self.cache.origin + position + 1 for position in self.positions]
        read = max(ends) if self.read_length is None else self.read_length
        return [max(read, end) for end in ends]


class Move(NamedTuple):
    """Of keys and values that `cache` keeps at places [start, end), to the places from `to` < `start` on, in all
    layers."""

    cache: KVCache
    start: int
    end: int
    to: int


class RaggedCache(LengthlessCache):
    """The contiguous caches of a ragged batch as one transformers cache."""

    def __init__(self, sequences: Sequence[RaggedSequence]) -> None:
        """Raises `InvalidInput` (reason CACHE_CAPACITY) if positions do not fit a sequence's cache."""
        spans, caches = [], []
        for sequence in sequences:
            cache, of_sequence = as_contiguous(sequence.cache), sequence.spans
            cache.begin(sequence.base, sequence.num_tokens)
            spans += of_sequence
            caches += [cache] * len(of_sequence)
        self.spans, self._caches = tuple(spans), tuple(caches)
        super().__init__(RaggedOffset(self.spans))
        self._bases = [span.base for span in self.spans]
        self._slot_mapping = [span.base + span.slot_offset for span in self.spans]
        self._counts = [span.num_tokens for span in self.spans]

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

    def layers_kv(self, keys: Tensor, values: Tensor, layers: tuple[int, ...]) -> LayerKV:
        """The tensors of layers per span, and the places in them that the pass will write: see
        `ContiguousCache.layers_kv`."""
        tables = [cache.tables(keys, values, layers) for cache in self._caches]
        return LayerKV(
            [key_table for [key_table], _ in tables],
            [value_table for _, [value_table] in tables],
            self._bases,
            self._slot_mapping,
            self._counts,
        )
