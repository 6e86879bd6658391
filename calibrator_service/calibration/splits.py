"""Heads, routers and report learn and measure on different sequences: routers that had seen their heads' training data would
believe them too much."""

import hashlib
from typing import Literal, get_args

import numpy as np

from calibrator_service.calibration.shards import TokenSequence

Split = Literal["heads", "routers", "report"]
SPLITS: tuple[Split, ...] = get_args(Split)
# Of every ten sequences that come; the rarer splits early, so that even a small corpus has all three.
PATTERN: tuple[Split, ...] = (
    "heads", "routers", "heads", "heads", "report", "heads", "heads", "heads", "heads", "heads",
)  # fmt: skip


class Splitter:
    """Deals sequences out. What begins alike (the same prompt gets the same greedy answer) is dealt once."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._num_dealt = 0

    def deal(self, sequence: TokenSequence) -> Split | None:
        """The sequence's split; None for one that was there before."""
        prompt = np.array(sequence.tokens[: sequence.answer_start], dtype=np.int64).tobytes()
        key = hashlib.blake2b(prompt, digest_size=8).digest()
        if key in self._seen:
            return None
        self._seen.add(key)
        split = PATTERN[self._num_dealt % len(PATTERN)]
        self._num_dealt += 1
        return split
