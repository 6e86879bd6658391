"""The prefix cache: keys and values of a common prompt prefix are copied instead of being computed again."""

import hashlib
from array import array
from bisect import bisect, bisect_left
from collections.abc import Iterable, Sequence
from sys import byteorder
from typing import Protocol

import numpy as np

from shared.model.cache import KVCache
from shared.model.regimes import Regimes

# A shorter prefix is computed faster than it is found, and every chat starts with the same few tokens of its template.
MIN_SHARED = 16
TOKEN_BYTES = 4
_SCOPE_BYTES = 16


def key_of(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, TOKEN_BYTES each, the most significant first: the order of keys is that of their tokens."""
    ids = array("I", tokens)
    if byteorder == "little":
        ids.byteswap()
    return ids.tobytes()


def scope_key_of(scope: str) -> bytes:
    """What the keys of a scope begin with, so that keys of two scopes have no common prefix that counts. "": nothing,
    for requests that share with all that have no scope either.

    Its first byte is that of no token id and of no regime, so no prompt can begin like a scope. The rest is a digest
    (BLAKE2b), and a common beginning of two digests is no more than they are long.
    """
    digest = hashlib.blake2b(scope.encode(), digest_size=_SCOPE_BYTES - 1).digest()
    return b"\xff" + digest if scope else b""


def common_prefix(left: bytes, right: bytes) -> int:
    """Length in tokens of the common prefix of two keys."""
    size = min(len(left), len(right)) // TOKEN_BYTES
    if not size:
        return 0
    differs = np.frombuffer(left, np.uint32, size) != np.frombuffer(right, np.uint32, size)
    first = int(differs.argmax())
    return first if differs[first] else size


class Donor(Protocol):
    """A sequence whose positions [0, num_settled) hold `tokens` in `cache`, through every layer. `given_key`: of the
    tokens that its request gives it. `scope_key`: with whom it shares. `read_length` as in `Sequence`."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def given_key(self) -> bytes: ...
    @property
    def scope_key(self) -> bytes: ...
    @property
    def num_settled(self) -> int: ...
    @property
    def cache(self) -> KVCache: ...
    @property
    def read_length(self) -> int: ...


class Reader(Donor, Protocol):
    """A sequence whose prompt is still being prefilled."""

    num_settled: int
    num_cached: int
    num_read_before: int


class Prefixes:
    """Keeps the KV caches of ended sequences, with a capacity of at most `max_tokens` tokens in all, in LRU order.

    Prefixes of prompts are also copied from running sequences. With `max_tokens` 0 nothing is shared. Only the engine's
    thread may use it; any thread may call `match_length`, which sees keys alone: a cache that is dropped is free at
    once. Keys and values are shared within one of the `regimes` only.
    """

    def __init__(self, max_tokens: int, regimes: Regimes | None = None) -> None:
        self._max_tokens = max_tokens
        self._regimes = regimes or Regimes()
        self.num_tokens = 0
        # The least recently used first. No key is a prefix of another one.
        self._caches: dict[bytes, KVCache] = {}
        # Its keys in their order: the longest match of a prompt is beside the prompt's own place. The tuple is replaced
        # and never changed, so that other threads can read it.
        self._sorted: tuple[bytes, ...] = ()

    @property
    def is_enabled(self) -> bool:
        """Whether prefixes are shared at all."""
        return self._max_tokens > 0

    def insert(self, sequence: Donor) -> None:
        """Takes over the cache of an ended sequence.
        Drops caches that it makes redundant and those that no longer fit."""
        num_settled, cache = sequence.num_settled, sequence.cache
        if num_settled < MIN_SHARED or cache.capacity > self._max_tokens:
            return
        key = sequence.given_key[: num_settled * TOKEN_BYTES]
        key += key_of(sequence.tokens[len(key) // TOKEN_BYTES : num_settled])
        key = self._marked(key, sequence.read_length, sequence.scope_key)
        place = bisect(self._sorted, key)
        for near in self._sorted[max(place - 1, 0) : place + 1]:
            if near.startswith(key):
                return
            if key.startswith(near):
                self._drop(near)
        place = bisect(self._sorted, key)
        self._sorted = (*self._sorted[:place], key, *self._sorted[place:])
        self._caches[key] = cache
        self.num_tokens += cache.capacity
        self.shrink_to(self._max_tokens)

    def shrink_to(self, num_tokens: int) -> None:
        """Drops the least recently used caches until they hold at most `num_tokens` tokens."""
        while self.num_tokens > max(num_tokens, 0):
            self._drop(next(iter(self._caches)))

    def _drop(self, key: bytes) -> None:
        self.num_tokens -= self._caches.pop(key).capacity
        place = bisect_left(self._sorted, key)
        self._sorted = self._sorted[:place] + self._sorted[place + 1 :]

    def match(self, reader: Reader, running: Iterable[Donor], most: int) -> int:
        """Copies the longest prefix of the prompt that a kept or running sequence has, and moves `reader` behind it.

        Copies `most` tokens, or a few more if it is done then. Returns how many are left to copy. The last token of a
        prompt is always computed, because the next token is chosen from its state.
        """
        if not self.is_enabled:
            return 0
        prompt, start = self._prompt_of(reader), reader.num_settled
        shared, key_of_best = self._longest(prompt, reader.scope_key)
        best = self._caches[key_of_best] if shared else None
        least = start + MIN_SHARED
        for donor in running:
            if donor is not reader and donor.num_settled >= max(least, shared + 1):
                common = min(self._common(prompt, donor, reader), donor.num_settled)
                if common > shared:
                    best, shared, key_of_best = donor.cache, common, b""
        if best is None or shared < least:
            return 0
        end = shared if shared - start < most + MIN_SHARED else start + most
        reader.cache.copy(best, start, end)
        reader.num_cached += max(end - max(start, reader.num_read_before), 0)
        reader.num_settled = end
        if key_of_best:
            self._caches[key_of_best] = self._caches.pop(key_of_best)
        return shared - end

    def is_being_computed(self, reader: Reader, reading: Iterable[Donor]) -> bool:
        """Whether a sequence of `reading` computes in this step what `reader` would compute next."""
        prompt = self._prompt_of(reader)
        least = reader.num_settled + MIN_SHARED
        return self.is_enabled and any(self._common(prompt, donor, reader) >= least for donor in reading)

    def match_length(self, given_key: bytes, scope_key: bytes = b"") -> int:
        """Tokens of the longest prefix of a prompt that a kept cache holds. Any thread may call it."""
        return self._longest(self._marked(given_key, len(given_key) // TOKEN_BYTES, scope_key), scope_key)[0]

    def _prompt_of(self, reader: Reader) -> bytes:
        """The key of its prompt, without the last token."""
        return self._marked(reader.given_key, reader.read_length, reader.scope_key)[:-TOKEN_BYTES]

    def _common(self, prompt: bytes, donor: Donor, reader: Reader) -> int:
        """Tokens of the prompt of `reader`, whose key is `prompt`, with which that of `donor` begins, too."""
        key = self._marked(donor.given_key, donor.read_length, donor.scope_key)
        return common_prefix(prompt, key) - len(reader.scope_key) // TOKEN_BYTES

    def _marked(self, key: bytes, read_length: int, scope_key: bytes) -> bytes:
        """The key of tokens of a scope whose angles are those of this length. The first byte of the tokens, which no
        token id reaches, says their regime, so keys of different regimes have no common prefix."""
        regime = self._regimes.of(read_length)
        return scope_key + (bytes([regime]) + key[1:] if regime else key)

    def _longest(self, prompt: bytes, scope_key: bytes) -> tuple[int, bytes]:
        """Length in tokens and key of the longest match."""
        keys = self._sorted
        place = bisect(keys, prompt)
        near = keys[max(place - 1, 0) : place + 1]
        num_scope = len(scope_key) // TOKEN_BYTES
        return max(((max(common_prefix(prompt, key) - num_scope, 0), key) for key in near), default=(0, b""))
