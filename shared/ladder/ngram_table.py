"""The n-gram table (proposer `ngram-table`), learnt at calibration, of the token that the full model most often chooses
after a short context.

Contexts are stored as 32-bit hashes, so a table of n entries takes an unseen context for a known one with probability n
/ 2^32. Under `exact` such a collision costs a rejected draft, never a wrong token.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.errors import Corrupt
from shared.ladder.proposers import Match

MAX_ORDER = 4
MAX_COUNT = 255
MULTIPLIER, MIXER = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
MASK = (1 << 64) - 1

Array = npt.NDArray[np.int64]


def context_keys(tokens: npt.NDArray[np.uint64], order: int) -> npt.NDArray[np.uint64]:
    """32-bit keys [max(S - order + 1, 0)] of all contexts of `order` tokens in `tokens` [S], in order."""
    size = len(tokens) - order + 1
    state = np.zeros(max(size, 0), dtype=np.uint64)
    for back in range(order):
        newest = tokens[order - 1 - back : order - 1 - back + size]
        state = _mix((state + newest + np.uint64(1)) * np.uint64(MULTIPLIER))
    return state >> np.uint64(32)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return (state ^ (state >> np.uint64(29))) * np.uint64(MIXER)


def context_states(context_tail: Sequence[int], salt: int = 0) -> list[int]:
    """64-bit hashes of the contexts of 1, 2, .. MAX_ORDER tokens that end `context_tail`. Without a salt, their upper
    halves are `context_keys`."""
    state, states = salt, []
    for token in islice(reversed(context_tail), MAX_ORDER):
        state = ((state + token + 1) * MULTIPLIER) & MASK
        state = ((state ^ (state >> 29)) * MIXER) & MASK
        states.append(state)
    return states


class NgramTable:
    """Immutable. Per order 1..MAX_ORDER: sorted context keys, and for each key a token, its count and its share (in
    255ths)."""

    def __init__(self, orders: Sequence[tuple[Array, Array, Array, Array]]) -> None:
        """`orders[m - 1]` = (keys, tokens, counts, shares) of contexts of m tokens, keys strictly increasing."""
        self._orders = [
            (
                array("I", keys.astype(np.uint32).tobytes()),
                array("I", tokens.astype(np.uint32).tobytes()),
                counts.astype(np.uint8).tobytes(),
                shares.astype(np.uint8).tobytes(),
            )
            for keys, tokens, counts, shares in orders
        ]

    @property
    def num_entries(self) -> int:
        return sum(len(keys) for keys, *_ in self._orders)

    def matches(self, context_tail: Sequence[int]) -> list[Match]:
        """One match per order whose context is in the table, the longest context first. Takes a few microseconds."""
        matches: list[Match] = []
        states = zip(context_states(context_tail), self._orders, strict=False)
        for order, (state, (keys, tokens, counts, shares)) in enumerate(states, 1):
            key = state >> 32
            entry = bisect_left(keys, key)
            if entry < len(keys) and keys[entry] == key:
                matches.append(Match(tokens[entry], order, counts[entry], shares[entry] / 255))
        matches.reverse()
        return matches

    def propose(self, context_tail: Sequence[int]) -> Match | None:
        """The match of the longest known context; None if not even the last token is known."""
        return next(iter(self.matches(context_tail)), None)

    def to_tensors(self) -> dict[str, Tensor]:
        """Tensors for safetensors, per order m: `m.keys` int32, `m.tokens` int16 or int32, `m.counts` and `m.shares`
        uint8.

        Signed integers hold the bit patterns of unsigned ones; tokens take 16 bits where all of them fit.
        """
        tensors: dict[str, Tensor] = {}
        for order, (keys, tokens, counts, shares) in enumerate(self._orders, 1):
            narrow = np.frombuffer(tokens, dtype=np.uint32)
            if len(narrow) == 0 or narrow.max() < 1 << 16:
                stored = torch.from_numpy(narrow.astype(np.uint16).view(np.int16))
            else:
                stored = torch.from_numpy(narrow.view(np.int32).copy())
            tensors |= {
                f"{order}.keys": torch.from_numpy(np.array(keys, dtype=np.uint32).view(np.int32)),
                f"{order}.tokens": stored,
                f"{order}.counts": torch.from_numpy(np.frombuffer(counts, dtype=np.uint8).copy()),
                f"{order}.shares": torch.from_numpy(np.frombuffer(shares, dtype=np.uint8).copy()),
            }
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], vocabulary_size: int) -> "NgramTable":
        """Raises `Corrupt` unless the tensors have the form that `to_tensors` returns, with tokens below
        `vocabulary_size`."""
        names = {f"{m}.{n}" for m in range(1, MAX_ORDER + 1) for n in ("keys", "tokens", "counts", "shares")}
        if set(tensors) != names:
            raise Corrupt("the n-gram table's tensors are not those of the format")
        orders = []
        for order in range(1, MAX_ORDER + 1):
            keys = _unsigned(tensors[f"{order}.keys"], torch.int32)
            tokens = _unsigned(tensors[f"{order}.tokens"], torch.int16, torch.int32)
            counts = _unsigned(tensors[f"{order}.counts"], torch.uint8)
            shares = _unsigned(tensors[f"{order}.shares"], torch.uint8)
            if not len(keys) == len(tokens) == len(counts) == len(shares):
                raise Corrupt(f"the n-gram table's columns of order {order} differ in length")
            if len(keys) and ((np.diff(keys) <= 0).any() or tokens.max() >= vocabulary_size or counts.min() < 1):
                raise Corrupt(f"the n-gram table's entries of order {order} are not valid")
            orders.append((keys, tokens, counts, shares))
        return cls(orders)


def _unsigned(tensor: Tensor, *dtypes: torch.dtype) -> Array:
    if tensor.dtype not in dtypes or tensor.dim() != 1:
        raise Corrupt("a column of the n-gram table has the wrong shape or dtype")
    bits = 8 * tensor.element_size()
    return tensor.numpy().astype(np.int64) & ((1 << bits) - 1)
