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

    def __init__(self, total: int, unit: str, full: Callable[[str], Exhausted]) -> None:
        """`unit` names the units in errors, in the plural. `full` makes the error where they are used up, of how many
        are."""
        self.total = total
        self.used = 0
        self._unit, self._full = unit, full
        self._held: Counter[str] = Counter()

    def take(self, client: str, amount: int = 1) -> None:
        """Raises Exhausted: that of `full` if fewer units are free, CLIENT_LIMIT if the client would hold more than it
        leaves free."""
        free = self.total - self.used
        if amount > free:
            raise self._full(self._told(self.used))
        if self._held[client] + amount > free:
            raise Exhausted(
                f"this client has {self._told(self._held[client])}", reason="CLIENT_LIMIT", retry_after_s=RETRY_AFTER_S
            )
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

    def _told(self, held: int) -> str:
        return f"{held} of {self.total} {self._unit}; no more are given"
