"""Divides what is bounded among clients, so that none of them can take all of it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from shared.errors import RETRY_AFTER_S, Exhausted

# The part of the total that a client may hold beyond its limit where more is needed to go on than to start.
SPARE_PART = 1 / 16


class Hold(Protocol):
    def __call__(self, amount: int, *, goes_on: bool = False) -> None:
        """Change what is held to `amount` units. Raises as `Shares.take` does if that is more than before."""


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

    def take(self, client: str, amount: int = 1, *, goes_on: bool = False) -> None:
        """Raises Exhausted: that of `full` if fewer units are free, CLIENT_LIMIT if the client would hold more than it
        leaves free. What `goes_on` may take `SPARE_PART` more, so that a client's next request, which is refused at the
        limit, does not end what the client has running."""
        free = self.total - self.used
        if amount > free:
            raise self._full(self._told(self.used))
        if self._held[client] + amount > free + goes_on * int(SPARE_PART * self.total):
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
    def holding(self, client: str) -> Iterator[Hold]:
        """Yield a function that changes what the block holds."""
        held = 0

        def hold(amount: int, *, goes_on: bool = False) -> None:
            nonlocal held
            if amount > held:
                self.take(client, amount - held, goes_on=goes_on)
            else:
                self.give_back(client, held - amount)
            held = amount

        try:
            yield hold
        finally:
            hold(0)

    def _told(self, held: int) -> str:
        return f"{held} of {self.total} {self._unit}; no more are given"
