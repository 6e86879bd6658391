"""Open watch streams: their limit, what wakes them, and their end when the service stops."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shared.errors import Exhausted, Unavailable

# Watchers of jobs, and as many of routers; and those of one client.
MAX_WATCHERS = 128
MAX_WATCHERS_PER_CLIENT = 32
_RETRY_S = 1.0


class Watchers:
    """Limits the number of open watch streams, wakes them, and ends them when the service stops.
    Made in the service's loop.

    `change`: for `wait_for`. Whoever takes it before looking misses no change.
    """

    def __init__(self) -> None:
        self._open: Counter[tuple[str, ...]] = Counter()
        self._loop = asyncio.get_running_loop()
        self._stopping, self.change = asyncio.Event(), asyncio.Event()

    @contextmanager
    def track_stream(self, kind: str, client: str) -> Iterator[None]:
        """Scope of one open stream. Raises Exhausted (TOO_MANY_WATCHERS), and Unavailable (SHUTTING_DOWN) once the
        service stops."""
        if self._stopping.is_set():
            raise _stopping_error()
        counts: tuple[tuple[str, ...], ...] = ((kind,), (kind, client))
        for count, most in zip(counts, (MAX_WATCHERS, MAX_WATCHERS_PER_CLIENT), strict=True):
            if self._open[count] >= most:
                raise Exhausted("too many watch streams are open", reason="TOO_MANY_WATCHERS", retry_after_s=_RETRY_S)
        self._open.update(counts)
        try:
            yield
        finally:
            self._open.subtract(counts)
            self._open = +self._open  # without clients that have none

    async def pause(self, seconds: float) -> None:
        """Waits. Raises Unavailable (SHUTTING_DOWN) as soon as the service stops."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return
        raise _stopping_error()

    async def wait_for(self, change: asyncio.Event) -> None:
        """Waits until something watched has changed.
        Raises Unavailable (SHUTTING_DOWN) as soon as the service stops."""
        await change.wait()
        if self._stopping.is_set():
            raise _stopping_error()

    def notify(self) -> None:
        """Something watched has changed. May be called from any thread."""
        with suppress(RuntimeError):  # the loop is gone: the service is ending
            self._loop.call_soon_threadsafe(self._wake)

    def stop(self) -> None:
        self._stopping.set()
        self._wake()

    def _wake(self) -> None:
        self.change.set()
        self.change = asyncio.Event()


def _stopping_error() -> Unavailable:
    return Unavailable("the service is shutting down; watch again", reason="SHUTTING_DOWN")
