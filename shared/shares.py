"""Divides what is bounded among clients, so that none of them can take all of it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.errors import RETRY_AFTER_S, Exhausted


class Shares:
    """`total` units, of which a client may hold no more than it leaves free for the others.

    So a single client gets half, and a second one half of the rest. Something is always left for a client that comes
    later. These are dynamic thresholds with factor 1 (Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2),
    1998). `used` counts the units that are held. Belongs to one event loop.
    """

    def __init__(self, total: int, unit: str, owner: str = "the gateway", full: str = "GATEWAY_FULL") -> None:
        """`unit` names the units in errors, in the plural, `owner` whose they are, and `full` is the reason where they
        are used up."""
        self.total = total
        self._owner, self._full = owner, full
        self.used = 0
        self._unit = unit
        self._held: Counter[str] = Counter()

    def take(self, client: str, amount: int = 1) -> None:
        """Raises Exhausted: `full` if fewer units are free, CLIENT_LIMIT if the client would hold more than it
        leaves free."""
        free = self.total - self.used
        if amount > free:
            raise self._refused(f"{self._owner} has", self.used, reason=self._full)
        if self._held[client] + amount > free:
            raise self._refused("this client has", self._held[client], reason="CLIENT_LIMIT")
        self.used += amount
        self._held[client] += amount

    def give_back(self, client: str, amount: int = 1) -> None:
        self.used -= amount
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]

    @contextmanager
    def holding(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that changes what the block holds to a number of units.
        Raises as `take` does if that is more than before."""
        held = 0

        def hold(amount: int) -> None:
            nonlocal held
            if amount > held:
                self.take(client, amount - held)
            else:
                self.give_back(client, held - amount)
            held = amount

        try:
            yield hold
        finally:
            hold(0)

    def _refused(self, who: str, held: int, *, reason: str) -> Exhausted:
        return Exhausted(
            f"{who} {held} of {self.total} {self._unit}; no more are given", reason=reason, retry_after_s=RETRY_AFTER_S
        )
