"""What a pass over several sequences in one row hands through a model's own forward to our attention.

Transformers passes masks, keys and values on without looking inside, so objects of ours may stand in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """`num_tokens` tokens of one sequence at positions [base, base + num_tokens)."""

    base: int
    num_tokens: int


class PackedOffset(int):
    """What transformers is told the first query's position is: 0, and to the mask function the spans of all sequences."""

    spans: tuple[Span, ...]

    def __new__(cls, spans: Sequence[Span]) -> "PackedOffset":
        offset = super().__new__(cls, 0)
        offset.spans = tuple(spans)
        return offset


@dataclass(frozen=True)
class PackedMask:
    """Per span a bool mask [1, 1, Q, base + Q], or an empty one where it is plain causal."""

    masks: tuple[Tensor, ...]


@dataclass(frozen=True)
class PackedStates:
    """Keys or values of a packed pass: `fresh` [1, Hkv, T, Dh], and per span the store [1, Hkv, S, Dh] they belong in."""

    fresh: Tensor
    stores: tuple[Tensor, ...]
    spans: tuple[Span, ...]
