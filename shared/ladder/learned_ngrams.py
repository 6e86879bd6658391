"""The learned proposer: an n-gram table that learns from the answers that are served, for each client apart.

The shipped `NgramTable` knows the texts of the calibration. This one knows what the same client was answered before.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_bytes

from shared.errors import InvalidInput
from shared.ladder.ngram_table import MAX_COUNT, MAX_ORDER, context_states
from shared.ladder.proposers import Match

# Entries of which one is replaced by a new context: the one that occurred least.
SET_ENTRIES = 4
ENTRY_BYTES = 15


class LearnedNgrams:
    """At most `max_bytes` of entries, all of them allocated at once.
    Used by the engine's thread only; any thread may read `num_entries`.

    An entry holds a context's hash, the tokens that followed it most often and last beside that one, and how often. The
    hash of a context begins with the client's salt, so no client finds another's entries. Salts need a secret of this
    process: a client cannot choose contexts that meet another's. New contexts replace old ones, of any client.
    """

    def __init__(self, max_bytes: int) -> None:
        self._num_sets = max_bytes // (SET_ENTRIES * ENTRY_BYTES)
        if self._num_sets < 1:
            raise InvalidInput(f"a learned table needs {SET_ENTRIES * ENTRY_BYTES} bytes")
        size = self._num_sets * SET_ENTRIES
        self._secret = token_bytes(16)
        self._keys, self._firsts, self._seconds = (array("I", bytes(4 * size)) for _ in range(3))
        # How often the context occurred; 0: an empty entry. Counts are halved before they exceed MAX_COUNT.
        self._totals, self._first_counts, self._second_counts = (bytearray(size) for _ in range(3))
        self.num_entries = 0

    def of(self, client: str) -> "ClientNgrams":
        """The part of the table that `client` learns and drafts from."""
        digest = blake2b(client.encode(errors="replace"), digest_size=8, key=self._secret).digest()
        return ClientNgrams(self, int.from_bytes(digest))

    def matches(self, salt: int, context_tail: Sequence[int]) -> list[Match]:
        """As `NgramTable.matches`."""
        matches: list[Match] = []
        for order, state in enumerate(context_states(context_tail, salt), 1):
            entry = self._find(state)
            if entry is not None:
                count = self._first_counts[entry]
                share = count / self._totals[entry]
                matches.append(Match(self._firsts[entry], order, count, share))
        matches.reverse()
        return matches

    def record(self, salt: int, context_tail: Sequence[int], token: int) -> None:
        """Counts that `token` followed each of the contexts that end `context_tail`."""
        for state in context_states(context_tail, salt):
            entry = self._find(state)
            if entry is None:
                self._insert(state, token)
            else:
                self._count(entry, token)

    def _entries(self, state: int) -> range:
        first = (state & 0xFFFFFFFF) % self._num_sets * SET_ENTRIES
        return range(first, first + SET_ENTRIES)

    def _find(self, state: int) -> int | None:
        key = state >> 32
        for entry in self._entries(state):
            if self._keys[entry] == key and self._totals[entry]:
                return entry
        return None

    def _insert(self, state: int, token: int) -> None:
        entry = min(self._entries(state), key=self._totals.__getitem__)
        self.num_entries += not self._totals[entry]
        self._keys[entry], self._firsts[entry] = state >> 32, token
        self._totals[entry] = self._first_counts[entry] = 1
        self._second_counts[entry] = 0

    def _count(self, entry: int, token: int) -> None:
        totals, counts, seconds = self._totals, self._first_counts, self._second_counts
        if totals[entry] == MAX_COUNT:
            totals[entry] //= 2
            counts[entry] = max(counts[entry] // 2, 1)
            seconds[entry] //= 2
        totals[entry] += 1
        if self._firsts[entry] == token:
            counts[entry] += 1
            return
        is_second = seconds[entry] and self._seconds[entry] == token
        seconds[entry] = seconds[entry] + 1 if is_second else 1
        self._seconds[entry] = token
        if seconds[entry] > counts[entry]:
            counts[entry], seconds[entry] = seconds[entry], counts[entry]
            self._firsts[entry], self._seconds[entry] = token, self._firsts[entry]


@dataclass(frozen=True, slots=True)
class ClientNgrams:
    """One client's part of a `LearnedNgrams`."""

    table: LearnedNgrams
    salt: int

    def matches(self, context_tail: Sequence[int]) -> list[Match]:
        """See `LearnedNgrams.matches`."""
        return self.table.matches(self.salt, context_tail)

    def learn(self, tokens: Sequence[int], first: int) -> None:
        """Counts each of `tokens[first:]` after the tokens before it. All of these must be the full model's choices."""
        for place in range(first, len(tokens)):
            context_tail = tokens[max(place - MAX_ORDER, 0) : place]
            self.table.record(self.salt, context_tail, tokens[place])
