"""The learned proposer: an n-gram table that learns from the answers that are served, for each client apart.

The shipped `NgramTable` knows the texts of the calibration. This one knows what the same client was answered before.
"""

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_bytes

from shared.errors import InvalidInput
from shared.ops.drafting import Handle, functions, tokens_of

# Entries of which one is replaced by a new context: the one that occurred least.
SET_ENTRIES = 4
ENTRY_BYTES = 16


class LearnedNgrams:
    """At most `max_bytes` of entries, all of them allocated at once.
    Used by the engine's thread only; any thread may read `num_entries`.

    An entry holds a context's hash, the tokens that followed it most often and last beside that one, and how often. The
    hash of a context begins with the client's salt, so no client finds another's entries. Salts need a secret of this
    process: a client cannot choose contexts that meet another's. New contexts replace old ones, of any client.
    """

    def __init__(self, max_bytes: int) -> None:
        num_sets = max_bytes // (SET_ENTRIES * ENTRY_BYTES)
        if num_sets < 1:
            raise InvalidInput(f"a learned table needs {SET_ENTRIES * ENTRY_BYTES} bytes")
        self._secret = token_bytes(16)
        self.handle = Handle("learned", c_int64(num_sets))

    @property
    def num_entries(self) -> int:
        count: int = functions().neap_learned_entries(self.handle.address)
        return count

    def of(self, client: str, on_behalf_of: str = "", pool: str = "") -> "ClientNgrams":
        """The part of the table that these learn and draft from (see `GenerationRequest`)."""
        name = f"{client}\0{on_behalf_of}\0{pool}".encode(errors="replace")
        digest = blake2b(name, digest_size=8, key=self._secret).digest()
        return ClientNgrams(self, int.from_bytes(digest))


@dataclass(frozen=True, slots=True)
class ClientNgrams:
    """One client's part of a `LearnedNgrams`."""

    table: LearnedNgrams
    salt: int

    def learn(self, tokens: Sequence[int], first: int) -> None:
        """Counts each of `tokens[first:]` after the tokens before it. All of these must be the full model's choices."""
        pointer, count, _kept = tokens_of(tokens)
        functions().neap_learned_learn(self.table.handle.address, self.salt, pointer, count, c_int64(first))
