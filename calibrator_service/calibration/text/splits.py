"""Assigns sequences to splits, so that heads, routers and the report learn from and are measured on different sequences.

A router trained on the data of its head would trust the head too much. The fourth split, risk, has prompts of its own: see
`risk_answers`.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from calibrator_service.calibration.text.shards import TokenSequence

Split = Literal["heads", "routers", "report"]
SPLITS: tuple[Split, ...] = get_args(Split)
# The splits of every ten sequences. The smaller splits come early, so that even a small corpus fills all three.
SPLIT_PATTERN: tuple[Split, ...] = (
    "heads", "routers", "heads", "heads", "report", "heads", "heads", "heads", "heads", "heads",
)  # fmt: skip


class Splitter:
    """Assigns each sequence to a split, in order of arrival. A prompt is used once: its greedy answer would be the same again."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._num_assigned = 0

    def assign(self, sequence: TokenSequence) -> Split | None:
        """The sequence's split; None if a sequence with the same prompt has been assigned before."""
        key = _key(sequence.tokens[: sequence.answer_start])
        if key in self._seen:
            return None
        self._seen.add(key)
        split = SPLIT_PATTERN[self._num_assigned % len(SPLIT_PATTERN)]
        self._num_assigned += 1
        return split

    def has_assigned(self, prompt: Sequence[int]) -> bool:
        """Whether a sequence with this prompt is in one of the splits."""
        return _key(prompt) in self._seen


def _key(prompt: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.array(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
