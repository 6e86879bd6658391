"""The n-gram table (proposer `ngram-table`), learnt at calibration, of the token that the full model most often chooses
after a short context.

Contexts are stored as 32-bit hashes, so a table of n entries takes an unseen context for a known one with probability n
/ 2^32. Under `exact` such a collision costs a rejected draft, never a wrong token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.errors import Corrupt

MAX_ORDER = 4
MAX_COUNT = 255
MULTIPLIER, MIXER = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9

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


class NgramTable:
    """Immutable. Per order 1..MAX_ORDER: sorted context keys, and for each key a token, its count and its share (in
    255ths)."""

    def __init__(self, orders: Sequence[tuple[Array, Array, Array, Array]]) -> None:
        """`orders[m - 1]` = (keys, tokens, counts, shares) of contexts of m tokens, keys strictly increasing."""
        dtypes = np.uint32, np.uint32, np.uint8, np.uint8
        self._orders = [
            [np.ascontiguousarray(part, dtype) for part, dtype in zip(order, dtypes, strict=True)] for order in orders
        ]

    @property
    def num_entries(self) -> int:
        return sum(len(keys) for keys, *_ in self._orders)

    @property
    def columns(self) -> list[list[npt.NDArray[Any]]]:
        """Keys and tokens (uint32), counts and shares (uint8), each as a list over the orders."""
        return [list(column) for column in zip(*self._orders, strict=True)]

    def to_tensors(self) -> dict[str, Tensor]:
        """Tensors for safetensors, per order m: `m.keys` int32, `m.tokens` int16 or int32, `m.counts` and `m.shares`
        uint8.

        Signed integers hold the bit patterns of unsigned ones; tokens take 16 bits where all of them fit.
        """
        tensors: dict[str, Tensor] = {}
        for order, (keys, tokens, counts, shares) in enumerate(self._orders, 1):
            if len(tokens) == 0 or tokens.max() < 1 << 16:
                stored = torch.from_numpy(tokens.astype(np.uint16).view(np.int16))
            else:
                stored = torch.from_numpy(tokens.view(np.int32).copy())
            tensors |= {
                f"{order}.keys": torch.from_numpy(keys.view(np.int32).copy()),
                f"{order}.tokens": stored,
                f"{order}.counts": torch.from_numpy(counts.copy()),
                f"{order}.shares": torch.from_numpy(shares.copy()),
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
