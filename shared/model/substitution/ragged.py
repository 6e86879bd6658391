"""What a ragged batch passes through a model's own forward to our attention.

Transformers passes masks, keys and values on without looking inside, so these objects can stand in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence at positions [start, end) as the model sees them. `origin` as in `KVCache`."""

    start: int
    end: int
    origin: int = 0

    @property
    def base(self) -> int:
        """The first token's position in the cache."""
        return self.start - self.origin

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class RaggedOffset(int):
    """The position of the first query as transformers sees it: 0.
    It carries the spans of all sequences to the mask function."""

    spans: tuple[Span, ...]

    def __new__(cls, spans: Sequence[Span]) -> "RaggedOffset":
        offset = super().__new__(cls, 0)
        offset.spans = tuple(spans)
        return offset


# What masks are cut to by models that run their last layers over the tokens alone whose logits are asked for: those of
# a pass are all asked for.
WHOLE = (slice(None), slice(0, None))


@dataclass(frozen=True)
class RaggedMask:
    """Per span a bool mask [1, 1, Q, base + Q], or an empty tensor where the mask is causal."""

    masks: tuple[Tensor, ...]

    def __getitem__(self, index: tuple[slice, ...]) -> "RaggedMask":
        """Itself: see `WHOLE`."""
        assert all(each in WHOLE for each in index)
        return self


@dataclass(frozen=True)
class RaggedStates:
    """Keys or values of a ragged batch: the new ones `fresh` [1, Hkv, T, Dh], and per span the tensor [1, Hkv, S, Dh]
    that they belong in."""

    fresh: Tensor
    caches: tuple[Tensor, ...]
    spans: tuple[Span, ...]
