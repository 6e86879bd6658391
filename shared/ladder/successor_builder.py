"""Builds a successor table: counts in bounded memory which token follows each context, and selects the entries to publish."""

from typing import Any

import numpy as np
import numpy.typing as npt

from shared.ladder.successors import MAX_COUNT, MAX_ORDER, Array, SuccessorTable, context_keys

# Distinct (context, token) pairs kept per order while counting; the rarest are dropped first (lossy counting, Manku and Motwani).
DEFAULT_CAPACITY = 4_000_000
# Positions added between two merges.
MAX_PENDING = 2_000_000
# A longer context that predicts the same token as the shorter one is kept only if its share is higher by this much.
MIN_SHARE_GAIN = 0.15
BYTES_PER_ENTRY = {True: 8, False: 10}  # by whether all tokens fit 16 bits


class SuccessorBuilder:
    """Counts the full model's greedy choices by context (`add`), then makes the table (`build`)."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        # Per order, rows (pair, parent, count). pair = key << 32 | token; parent = key of the context without its first token.
        self._pairs = [np.zeros((0, 3), dtype=np.uint64) for _ in range(MAX_ORDER)]
        self._pending: list[list[npt.NDArray[np.uint64]]] = [[] for _ in range(MAX_ORDER)]
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
            own = keys[order - 1][start - order + 1 :]
            parent = keys[order - 2][start - order + 2 :] if order > 1 else np.zeros_like(own)
            pair = (own << np.uint64(32)) | choices[start:].astype(np.uint64)
            self._pending[order - 1].append(np.stack([pair, parent, np.ones_like(own)], 1))
        self._num_pending += len(tokens) - first
        if self._num_pending > MAX_PENDING:
            self._merge()

    def _merge(self) -> None:
        for index, pending in enumerate(self._pending):
            rows = np.concatenate([self._pairs[index], *pending])
            pairs, where, inverse = np.unique(rows[:, 0], return_index=True, return_inverse=True)
            counts = np.bincount(inverse, weights=rows[:, 2].astype(np.float64))
            merged = np.stack([pairs, rows[where, 1], counts.astype(np.uint64)], 1)
            if len(merged) > self._capacity:
                kept = np.argsort(-counts, kind="stable")[: self._capacity]
                merged = merged[np.sort(kept)]
            self._pairs[index] = merged
        self._pending = [[] for _ in range(MAX_ORDER)]
        self._num_pending = 0

    def build(self, max_bytes: int) -> SuccessorTable:
        """A table of the most frequent entries that fit in `max_bytes`."""
        self._merge()
        columns = []
        best_of_parent: dict[str, npt.NDArray[Any]] = {}
        for index in range(MAX_ORDER):
            keys, tokens, counts, totals, parents = _best(self._pairs[index])
            shares = counts / np.maximum(totals, 1)
            kept = np.ones(len(counts), dtype=np.bool_)
            if index:
                kept = ~_redundant(tokens, counts, shares, parents, best_of_parent)
            best_of_parent = {"keys": keys, "tokens": tokens, "shares": shares}
            columns.append((keys[kept], tokens[kept], counts[kept], shares[kept]))
        narrow = all(len(c[1]) == 0 or c[1].max() < 1 << 16 for c in columns)
        budget = max_bytes // BYTES_PER_ENTRY[narrow]
        all_counts = np.concatenate([c[2] * c[3] for c in columns])
        if len(all_counts) > budget:
            floor = np.sort(all_counts)[::-1][budget]
            columns = [tuple(c[(r[2] * r[3]) > floor] for c in r) for r in columns]
        return SuccessorTable(
            [
                (
                    keys.astype(np.int64),
                    tokens.astype(np.int64),
                    np.minimum(counts, MAX_COUNT).astype(np.int64),
                    np.round(shares * 255).astype(np.int64),
                )
                for keys, tokens, counts, shares in columns
            ]
        )


def _best(rows: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], ...]:
    """Columns (key, token, count, total, parent), sorted by key: the most frequent token per key (of equals the smallest), its count,
    the total over all tokens of the key, and the parent key."""
    keys, tokens = rows[:, 0] >> np.uint64(32), rows[:, 0] & np.uint64(0xFFFFFFFF)
    counts = rows[:, 2].astype(np.int64)
    order = np.lexsort((tokens, -counts, keys))
    unique, first, inverse = np.unique(keys[order], return_index=True, return_inverse=True)
    totals = np.bincount(inverse, weights=counts[order].astype(np.float64), minlength=len(unique))
    chosen = order[first]
    return (
        unique,
        tokens[chosen],
        counts[chosen].astype(np.uint64),
        totals.astype(np.uint64),
        rows[chosen, 1],
    )


def _redundant(
    tokens: npt.NDArray[np.uint64],
    counts: npt.NDArray[np.uint64],
    shares: npt.NDArray[np.float64],
    parents: npt.NDArray[np.uint64],
    shorter: dict[str, npt.NDArray[Any]],
) -> npt.NDArray[np.bool_]:
    """Marks entries that add nothing to the context one token shorter: it predicts the same token, and this entry's share is not
    clearly higher (`MIN_SHARE_GAIN`) or it was seen only once."""
    if len(shorter["keys"]) == 0:
        return np.zeros(len(tokens), dtype=np.bool_)
    parent = np.searchsorted(shorter["keys"], parents).clip(max=len(shorter["keys"]) - 1)
    same: npt.NDArray[np.bool_] = (shorter["keys"][parent] == parents) & (
        shorter["tokens"][parent] == tokens
    )
    no_gain: npt.NDArray[np.bool_] = (shorter["shares"][parent] >= shares - MIN_SHARE_GAIN) | (
        counts < 2
    )
    return same & no_gain
