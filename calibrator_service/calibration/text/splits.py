"""Heads, routers and report learn and measure on different sequences: routers that had seen their heads' training data would
believe them too much. The fourth split, risk, is not dealt from what comes: see `held_out`."""

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from calibrator_service.calibration.text.shards import TokenSequence

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
        key = _key(sequence.tokens[: sequence.answer_start])
        if key in self._seen:
            return None
        self._seen.add(key)
        split = PATTERN[self._num_dealt % len(PATTERN)]
        self._num_dealt += 1
        return split

    def has_dealt(self, prompt: Sequence[int]) -> bool:
        """Whether a sequence with this prompt is in one of the splits."""
        return _key(prompt) in self._seen


def _key(prompt: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.array(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
