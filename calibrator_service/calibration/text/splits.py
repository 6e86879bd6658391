"""Assigns sequences to splits, so that heads, confidences and the report learn from and are measured on different
sequences.

A confidence head trained on the data of its head would trust the head too much.
"""

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from calibrator_service.calibration.text.shards import TokenSequence

Split = Literal["heads", "confidence", "report"]
SPLITS: tuple[Split, ...] = get_args(Split)
# The splits of every ten sequences.
SPLIT_PATTERN: tuple[Split, ...] = (
    "heads", "confidence", "heads", "heads", "report", "heads", "heads", "heads", "heads", "heads",
)  # fmt: skip
# The first NUM_EARLY sequences are assigned by EARLY_PATTERN: a tenth of a small text would be too little for routers
# and figures.
EARLY_PATTERN: tuple[Split, ...] = ("heads", "confidence", "heads", "report")
NUM_EARLY = 40


# With fewer kinds of prompts than this none is held out for the report.
MIN_KINDS = 4


class Splitter:
    """Assigns each sequence to a split, in order of arrival. All answers to a prompt are in one split. A greedy answer
    is used once: it would be the same again.

    `held_out_kinds`: kinds of prompts that the report split has to itself. Without them each split has prompts of all
    kinds. `learned`: the `learned` of the parent's text. Nothing of it is learned from again, and nothing is measured
    on its prompts.
    """

    def __init__(self, held_out_kinds: Collection[str] = (), learned: Collection[int] = ()) -> None:
        self._held_out_kinds = frozenset(held_out_kinds)
        self.learned = set(learned)
        self._before = frozenset(self.learned)
        self._seen: set[int] = set()
        self._split_of: dict[int, Split] = {}  # by the prompt: all its answers are in one split
        self._num_assigned = 0

    def assign(self, sequence: TokenSequence) -> Split | None:
        """The sequence's split; None if it has been assigned before, or a greedy answer to its prompt."""
        prompt = _key(sequence.prompt)
        key = prompt if sequence.is_greedy else _key(sequence.tokens)
        if key in self._seen or key in self._before:
            return None
        self._seen.add(key)
        if prompt not in self._split_of:
            is_known = prompt in self._before
            self._split_of[prompt] = "heads" if is_known else self._new_split(sequence.kind)
        if self._split_of[prompt] == "heads":
            self.learned |= {prompt, key}
        return self._split_of[prompt]

    def _new_split(self, kind: str) -> Split:
        if kind in self._held_out_kinds:
            return "report"
        pattern = EARLY_PATTERN if self._num_assigned < NUM_EARLY else SPLIT_PATTERN
        split = pattern[self._num_assigned % len(pattern)]
        self._num_assigned += 1
        return "heads" if self._held_out_kinds and split == "report" else split


def _key(prompt: Sequence[int]) -> int:
    """A signed number of 64 bits."""
    digest = hashlib.blake2b(np.array(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def held_out_kinds(counts: Mapping[str, int], seed: int) -> frozenset[str]:
    """Kinds of prompts for the report split: random ones with about its share of all prompts.
    None if there are fewer than MIN_KINDS."""
    if len(counts) < MIN_KINDS:
        return frozenset()
    kinds = sorted(counts)
    random.Random(f"{seed}/kinds").shuffle(kinds)
    target = sum(counts.values()) * SPLIT_PATTERN.count("report") / len(SPLIT_PATTERN)
    chosen: set[str] = set()
    for kind in kinds:
        if not chosen or sum(counts[k] for k in chosen) + counts[kind] <= target:
            chosen.add(kind)
    return frozenset(chosen)
