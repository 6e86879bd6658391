"""The prefix cache: keys and values of a common prompt prefix are copied instead of being computed again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.model.cache import KVCache

# A shorter prefix is computed faster than it is found, and every chat starts with the same few tokens of its template.
MIN_SHARED = 16


class Donor(Protocol):
    """A sequence whose positions [0, num_settled) hold `tokens` in `cache`, through every layer."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def num_settled(self) -> int: ...
    @property
    def cache(self) -> KVCache: ...


class Reader(Donor, Protocol):
    """A sequence whose prompt is still being prefilled."""

    num_settled: int
    num_cached: int

    @property
    def num_prompt_tokens(self) -> int: ...


@dataclass(frozen=True)
class _Kept:
    """The cache of an ended sequence. `num_tokens`: its capacity, used or not."""

    tokens: tuple[int, ...]
    cache: KVCache
    num_tokens: int

    @property
    def num_settled(self) -> int:
        return len(self.tokens)


class Prefixes:
    """Keeps the KV caches of ended sequences, with a capacity of at most `max_tokens` tokens in all, in LRU order.

    Prefixes are also copied from running sequences. With `max_tokens` 0 nothing is shared. Only the engine's thread may use it;
    any thread may call `match_length`.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # The tuple is replaced and never changed, so that other threads can read it.
        self._kept: tuple[_Kept, ...] = ()

    @property
    def is_enabled(self) -> bool:
        """Whether prefixes are shared at all."""
        return self._max_tokens > 0

    @property
    def num_tokens(self) -> int:
        return sum(kept.num_tokens for kept in self._kept)

    def insert(self, sequence: Donor) -> None:
        """Takes over the cache of an ended sequence. Drops caches that it makes redundant and those that no longer fit."""
        tokens = tuple(sequence.tokens[: sequence.num_settled])
        new = _Kept(tokens, sequence.cache, sequence.cache.capacity)
        if len(tokens) < MIN_SHARED or new.num_tokens > self._max_tokens:
            return
        if any(kept.tokens[: len(tokens)] == tokens for kept in self._kept):
            return
        others = (kept for kept in self._kept if tokens[: len(kept.tokens)] != kept.tokens)
        self._kept = (*others, new)
        self.shrink_to(self._max_tokens)

    def shrink_to(self, num_tokens: int) -> None:
        """Drops the least recently used caches until they hold at most `num_tokens` tokens."""
        while self.num_tokens > max(num_tokens, 0):
            self._kept = self._kept[1:]

    def match(self, reader: Reader, running: Iterable[Donor]) -> None:
        """Copies the longest prefix of the prompt that a kept or running sequence has, and moves `reader` behind it.

        The last token of a prompt is always computed, because the next token is chosen from its state.
        """
        if not self.is_enabled:
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

    def is_being_computed(self, reader: Reader, reading: Iterable[Donor]) -> bool:
        """Whether a sequence of `reading` computes in this step what `reader` would compute next."""
        prompt = reader.tokens[: reader.num_prompt_tokens - 1]
        wanted = reader.num_settled + MIN_SHARED
        return self.is_enabled and any(
            common_prefix(prompt, other.tokens) >= wanted for other in reading
        )

    def match_length(self, prompt: Sequence[int]) -> int:
        """Length of the longest prefix of `prompt` that a kept cache holds. Any thread may call it."""
        return max((common_prefix(prompt, kept.tokens) for kept in self._kept), default=0)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
