"""A lease: of several processes that use one registry, one at a time acts.

Each term of a lease is an object of the next number, which only one process can create. Nobody compares clocks: a
process counts as the holder for `lasts_s` after it *began* to create its last term, and others take the lease only
after they have *seen* the same term for that long, each by its own clock. So their wait ends later than its term.

What a holder does may still be late, if it stood still in between. So it acts by compare-and-swap, and the lease saves
work rather than guards data.
"""

import uuid

from shared.registry.encoding import open_sealed, seal
from shared.registry.marks import elapsed_s
from shared.registry.names import check_alias
from shared.registry.store import Store
from shared.timeouts import LEASE_LASTS_S


class Lease:
    """The lease `name` as this process sees it. Belongs to one thread. Every method asks the store, and raises its
    errors; a process that cannot ask does not hold the lease for longer than its term."""

    def __init__(self, store: Store, name: str, *, lasts_s: float = LEASE_LASTS_S) -> None:
        """`lasts_s`: the same in all processes."""
        self._store = store
        self._folder = f"leases/{check_alias(name)}"
        self._lasts_s = lasts_s
        self._holder = uuid.uuid4().hex
        self._held_until_s = float("-inf")
        # The newest term that another has, and since when this process has seen it.
        self._seen: tuple[str, float] = ("", 0.0)

    @property
    def is_held(self) -> bool:
        """Whether this process may act now. Asks nobody."""
        return elapsed_s() < self._held_until_s

    @property
    def renew_after_s(self) -> float:
        """After so many seconds `hold` is due again."""
        return self._lasts_s / 3

    def hold(self) -> bool:
        """Take or renew the lease if it is free or held here. Returns whether this process holds it."""
        now_s = elapsed_s()
        newest = max(self._store.names(self._folder), default="")
        if newest and not self._may_follow(newest, now_s):
            return False
        term = f"{int(newest or 0) + 1:020}"
        began_s = elapsed_s()
        self._store.create(f"{self._folder}/{term}", seal({"holder": self._holder}))
        # Read back: the answer to an earlier attempt may have been lost, and a term that was removed since it was
        # listed could be created once more.
        names = self._store.names(self._folder)
        if max(names) != term or self._holder_of(term) != self._holder:
            self._held_until_s = float("-inf")
            return False
        self._held_until_s = began_s + self._lasts_s
        for name in names:
            if name < term:
                self._store.remove(f"{self._folder}/{name}")
        return True

    def give_up(self) -> None:
        """Let the next process have the lease at once."""
        if self.is_held:
            newest = max(self._store.names(self._folder), default="0")
            self._held_until_s = float("-inf")
            self._store.create(f"{self._folder}/{int(newest) + 1:020}", seal({"holder": ""}))

    def _may_follow(self, term: str, now_s: float) -> bool:
        if self.is_held:
            return True
        if self._seen[0] != term:
            self._seen = term, now_s
        return now_s - self._seen[1] > self._lasts_s or self._holder_of(term) in ("", self._holder)

    def _holder_of(self, term: str) -> str | None:
        path = f"{self._folder}/{term}"
        data = self._store.get(path)
        return None if data is None else str(open_sealed(data, path)["holder"])
