"""Prompts that start alike share the work: keys and values of a common beginning are copied, not computed again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.model.cache import SlotCache

# Shorter beginnings are read faster than looked for, and every chat starts with the same few template tokens.
MIN_SHARED = 16


class Donor(Protocol):
    """A sequence whose positions [0, num_settled) hold `tokens` in `cache`, through every layer."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def num_settled(self) -> int: ...
    @property
    def cache(self) -> SlotCache: ...


class Reader(Donor, Protocol):
    """A sequence that is still reading its prompt."""

    num_settled: int
    num_cached: int

    @property
    def num_prompt_tokens(self) -> int: ...


@dataclass(frozen=True)
class _Kept:
    """What an ended sequence left. `num_slots`: how many its cache holds, used or not."""

    tokens: tuple[int, ...]
    cache: SlotCache
    num_slots: int

    @property
    def num_settled(self) -> int:
        return len(self.tokens)


class Prefixes:
    """Caches of ended sequences, the most recently useful last, `max_slots` positions in all; running sequences lend, too.

    With `max_slots` 0 nothing is shared at all.

    The engine's thread alone, but for `longest`.
    """

    def __init__(self, max_slots: int) -> None:
        self._max_slots = max_slots
        # Replaced, never changed, so that other threads may read it.
        self._kept: tuple[_Kept, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether anything is shared."""
        return self._max_slots > 0

    @property
    def num_slots(self) -> int:
        return sum(kept.num_slots for kept in self._kept)

    def keep(self, sequence: Donor) -> None:
        """Takes over the cache of a sequence that has ended; drops what it makes superfluous and what no longer fits."""
        tokens = tuple(sequence.tokens[: sequence.num_settled])
        new = _Kept(tokens, sequence.cache, sequence.cache.capacity)
        if len(tokens) < MIN_SHARED or new.num_slots > self._max_slots:
            return
        if any(kept.tokens[: len(tokens)] == tokens for kept in self._kept):
            return
        others = (kept for kept in self._kept if tokens[: len(kept.tokens)] != kept.tokens)
        self._kept = (*others, new)
        self.fit(self._max_slots)

    def fit(self, num_slots: int) -> None:
        """Drops the least recently useful until at most `num_slots` positions are held."""
        while self.num_slots > max(num_slots, 0):
            self._kept = self._kept[1:]

    def lend(self, reader: Reader, running: Iterable[Donor]) -> None:
        """Moves `reader` ahead to where its prompt parts from all that is known, if that saves it anything.

        The last token of a prompt is always read: what follows it is chosen from its state.
        """
        if not self.is_open:
            return
        prompt = reader.tokens[: reader.num_prompt_tokens - 1]
        best: Donor | None = None
        shared = reader.num_settled + MIN_SHARED - 1
        for donor in (*self._kept, *running):
            if donor is not reader and donor.num_settled > shared:
                common = min(common_prefix(prompt, donor.tokens), donor.num_settled)
                if common > shared:
                    best, shared = donor, common
        if best is None:
            return
        reader.cache.copy(best.cache, reader.num_settled, shared)
        reader.num_cached += shared - reader.num_settled
        reader.num_settled = shared
        if isinstance(best, _Kept):
            self._kept = (*(kept for kept in self._kept if kept is not best), best)

    def is_being_read(self, reader: Reader, reading: Iterable[Donor]) -> bool:
        """Whether a sequence of `reading`, at work on its prompt in this very step, reads what `reader` would read next."""
        prompt = reader.tokens[: reader.num_prompt_tokens - 1]
        wanted = reader.num_settled + MIN_SHARED
        return self.is_open and any(
            common_prefix(prompt, other.tokens) >= wanted for other in reading
        )

    def longest(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` an ended sequence could lend now. From any thread."""
        return max((common_prefix(prompt, kept.tokens) for kept in self._kept), default=0)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their start."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
