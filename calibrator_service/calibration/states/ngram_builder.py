"""Builds an n-gram table: counts in bounded memory which token follows each context, and selects the entries to
publish."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from calibrator_service.calibration.ranks import Ranks
from shared.errors import Corrupt
from shared.ladder.ngram_table import MAX_COUNT, MAX_ORDER, Array, NgramTable, context_keys

# Distinct (context, token) pairs kept per order while counting; the rarest are dropped first (lossy counting, Manku and
# Motwani).
DEFAULT_CAPACITY = 4_000_000
# Positions added between two merges.
MAX_PENDING = 2_000_000
# A longer context that predicts the same token as the shorter one is kept only if its share is higher by this much.
MIN_SHARE_GAIN = 0.15
BYTES_PER_ENTRY = {True: 8, False: 10}  # by whether all tokens fit 16 bits
# Pairs of all orders that `to_tensors` keeps. Each has 20 bytes there.
MAX_STORED_PAIRS = 4_000_000
# The lower half of a pair.
_TOKEN = np.uint64(0xFFFFFFFF)


class NgramTableBuilder:
    """Counts the full model's greedy choices by context (`add`), then makes the table (`build`)."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        # Per order, rows (pair, parent) and their counts. pair = key << 32 | token; parent = key of the context without
        # its first token.
        self._pairs = [_Pairs.none() for _ in range(MAX_ORDER)]
        self._pending: list[list[_Pairs]] = [[] for _ in range(MAX_ORDER)]
        self._num_pending = 0

    def add(self, tokens: Array, choices: Array, first: int = 0) -> None:
        """Counts one sequence: `tokens` [S], and `choices` [S], the full model's choice after each token.

        Positions before `first` serve as context only and are not counted.
        """
        context = tokens.astype(np.uint64)
        keys = [context_keys(context, order) for order in range(1, MAX_ORDER + 1)]
        for order in range(1, MAX_ORDER + 1):
            start = max(first, order - 1)
            if start >= len(tokens):
                break
            key = keys[order - 1][start - order + 1 :]
            parent = keys[order - 2][start - order + 2 :] if order > 1 else np.zeros_like(key)
            pair = (key << np.uint64(32)) | choices[start:].astype(np.uint64)
            self._pending[order - 1].append(_Pairs(pair, parent, np.ones(len(pair))))
        self._num_pending += len(tokens) - first
        if self._num_pending > MAX_PENDING:
            self._merge()

    def add_over(self, ranks: Ranks) -> None:
        """At the first rank, adds the counts of all others."""
        self._merge()
        for other in ranks.others(self):
            self.add_counts(other)

    def add_counts(self, other: "NgramTableBuilder", share: float = 1.0) -> None:
        """Adds `share` times another builder's counts. Whole counts add exactly."""
        other._merge()
        for index, pairs in enumerate(other._pairs):
            self._pending[index].append(_Pairs(pairs.pair, pairs.parent, share * pairs.count))
        self._merge()

    def to_tensors(self, max_pairs: int = MAX_STORED_PAIRS) -> dict[str, Tensor]:
        """The counts, per order: "N.pairs" int64 [P], ascending as unsigned numbers, "N.parents" int32 [P], "N.counts"
        float64 [P].

        Of more than `max_pairs` in all orders together, the rarest are left out, of equally rare ones those of longer
        contexts.
        """
        self._merge()
        counts = np.concatenate([pairs.count for pairs in self._pairs])
        is_kept = np.zeros(len(counts), dtype=np.bool_)
        is_kept[np.argsort(-counts, kind="stable")[:max_pairs]] = True
        ends = np.cumsum([len(pairs.count) for pairs in self._pairs])[:-1]
        tensors: dict[str, Tensor] = {}
        for order, (pairs, mask) in enumerate(zip(self._pairs, np.split(is_kept, ends), strict=True), 1):
            parents = pairs.parent[mask].astype(np.uint32)
            tensors[f"{order}.pairs"] = torch.from_numpy(pairs.pair[mask].view(np.int64))
            tensors[f"{order}.parents"] = torch.from_numpy(parents.view(np.int32))
            tensors[f"{order}.counts"] = torch.from_numpy(pairs.count[mask])
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], vocabulary_size: int) -> "NgramTableBuilder":
        """Reads what `to_tensors` returned. Raises `Corrupt` for anything else."""
        orders = range(1, MAX_ORDER + 1)
        if set(tensors) != {f"{n}.{part}" for n in orders for part in ("pairs", "parents", "counts")}:
            raise Corrupt("the counts of n-grams do not have the tensors of their format")
        builder = cls()
        for order in orders:
            parts = [tensors[f"{order}.{part}"] for part in ("pairs", "parents", "counts")]
            dtypes = [part.dtype for part in parts]
            if dtypes != [torch.int64, torch.int32, torch.float64] or any(
                part.shape != (len(parts[0]),) for part in parts
            ):
                raise Corrupt("the counts of n-grams have wrong dtypes or shapes")
            pair = parts[0].numpy().view(np.uint64)
            parent = parts[1].numpy().view(np.uint32).astype(np.uint64)
            count = parts[2].numpy()
            if not (
                bool((pair[1:] > pair[:-1]).all())
                and bool(((pair & _TOKEN) < vocabulary_size).all())
                and bool((np.isfinite(count) & (count > 0)).all())
            ):
                raise Corrupt("the counts of n-grams are not ordered, or not those of this model")
            builder._pairs[order - 1] = _Pairs(pair, parent, count)
        return builder

    def _merge(self) -> None:
        for index, pending in enumerate(self._pending):
            if pending:
                self._pairs[index] = _merged([self._pairs[index], *pending], self._capacity)
        self._pending = [[] for _ in range(MAX_ORDER)]
        self._num_pending = 0

    def build(self, max_bytes: int) -> NgramTable:
        """A table of the most frequent entries that fit in `max_bytes`."""
        self._merge()
        columns = []
        best_of_parent: dict[str, npt.NDArray[Any]] = {}
        for index in range(MAX_ORDER):
            keys, tokens, counts, totals, parents = _best(self._pairs[index])
            shares = counts / totals
            is_kept = np.ones(len(counts), dtype=np.bool_)
            if index:
                is_kept = ~_redundant(tokens, counts, shares, parents, best_of_parent)
            best_of_parent = {"keys": keys, "tokens": tokens, "shares": shares}
            columns.append((keys[is_kept], tokens[is_kept], counts[is_kept], shares[is_kept]))
        narrow = all(len(c[1]) == 0 or c[1].max() < 1 << 16 for c in columns)
        budget = max_bytes // BYTES_PER_ENTRY[narrow]
        all_counts = np.concatenate([c[2] * c[3] for c in columns])
        if len(all_counts) > budget:
            floor = np.sort(all_counts)[::-1][budget]
            columns = [tuple(c[(r[2] * r[3]) > floor] for c in r) for r in columns]
        return NgramTable(
            [
                (
                    keys.astype(np.int64),
                    tokens.astype(np.int64),
                    np.minimum(np.ceil(counts), MAX_COUNT).astype(np.int64),
                    np.round(shares * 255).astype(np.int64),
                )
                for keys, tokens, counts, shares in columns
            ]
        )


@dataclass(frozen=True)
class _Pairs:
    """Columns [P]: `pair` and `parent` uint64, `count` float64, which may be a share of a parent's count."""

    pair: npt.NDArray[np.uint64]
    parent: npt.NDArray[np.uint64]
    count: npt.NDArray[np.float64]

    @classmethod
    def none(cls) -> "_Pairs":
        return cls(np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0))


def _merged(parts: list[_Pairs], capacity: int) -> _Pairs:
    """The sum of `parts`, ordered by pair; at most `capacity` pairs."""
    pairs, where, inverse = np.unique(
        np.concatenate([part.pair for part in parts]), return_index=True, return_inverse=True
    )
    parents = np.concatenate([part.parent for part in parts])[where]
    weights = np.concatenate([part.count for part in parts])
    counts = np.bincount(inverse, weights=weights, minlength=len(pairs)).astype(np.float64)
    if len(pairs) > capacity:
        commonest = np.sort(np.argsort(-counts, kind="stable")[:capacity])
        pairs, parents, counts = pairs[commonest], parents[commonest], counts[commonest]
    return _Pairs(pairs, parents, counts)


def _best(pairs: _Pairs) -> tuple[npt.NDArray[Any], ...]:
    """Columns (key, token, count, total, parent), sorted by key: the most frequent token per key (of equals the
    smallest), its count, the total over all tokens of the key, and the parent key."""
    keys, tokens, counts = pairs.pair >> np.uint64(32), pairs.pair & _TOKEN, pairs.count
    order = np.lexsort((tokens, -counts, keys))
    unique, first, inverse = np.unique(keys[order], return_index=True, return_inverse=True)
    totals = np.bincount(inverse, weights=counts[order], minlength=len(unique))
    chosen = order[first]
    return unique, tokens[chosen], counts[chosen], totals, pairs.parent[chosen]


def _redundant(
    tokens: npt.NDArray[np.uint64],
    counts: npt.NDArray[np.float64],
    shares: npt.NDArray[np.float64],
    parents: npt.NDArray[np.uint64],
    shorter: dict[str, npt.NDArray[Any]],
) -> npt.NDArray[np.bool_]:
    """Marks entries that add nothing to the context one token shorter: it predicts the same token, and this entry's
    share is not clearly higher (`MIN_SHARE_GAIN`) or it was seen only once."""
    if len(shorter["keys"]) == 0:
        return np.zeros(len(tokens), dtype=np.bool_)
    parent = np.searchsorted(shorter["keys"], parents).clip(max=len(shorter["keys"]) - 1)
    same: npt.NDArray[np.bool_] = (shorter["keys"][parent] == parents) & (shorter["tokens"][parent] == tokens)
    no_gain: npt.NDArray[np.bool_] = (shorter["shares"][parent] >= shares - MIN_SHARE_GAIN) | (counts < 2)
    return same & no_gain
