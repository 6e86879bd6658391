"""The limit on open watch streams, and their end when the service stops."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Exhausted, Unavailable

MAX_WATCHERS = 128
_RETRY_S = 1.0


class Watchers:
    """Limits the number of open watch streams, and ends them when the service stops."""

    def __init__(self) -> None:
        self._num_watchers = 0
        self._stopping = asyncio.Event()

    @contextmanager
    def track_stream(self) -> Iterator[None]:
        """Scope of one open stream. Raises Exhausted (TOO_MANY_WATCHERS), and Unavailable (SHUTTING_DOWN) once the service stops."""
        if self._stopping.is_set():
            raise _stopping_error()
        if self._num_watchers >= MAX_WATCHERS:
            raise Exhausted(
                "too many watch streams are open",
                reason="TOO_MANY_WATCHERS",
                retry_after_s=_RETRY_S,
            )
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1

    async def pause(self, seconds: float) -> None:
        """Waits. Raises Unavailable (SHUTTING_DOWN) as soon as the service stops."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return
        raise _stopping_error()

    def stop(self) -> None:
        self._stopping.set()


def _stopping_error() -> Unavailable:
    return Unavailable("the service is shutting down; watch again", reason="SHUTTING_DOWN")
