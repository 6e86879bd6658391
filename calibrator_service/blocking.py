"""Blocking calls from asyncio, in a bounded pool, and the bound on streams that watch."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from shared.errors import Exhausted, Unavailable

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS = 8
MAX_PENDING_CALLS = 256
MAX_WATCHERS = 128
_RETRY_S = 1.0


class BlockingPool:
    """`call` refuses with Exhausted (TOO_MANY_CALLS) rather than let a queue grow without bound."""

    def __init__(
        self, num_threads: int = NUM_THREADS, max_pending: int = MAX_PENDING_CALLS
    ) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="blocking")
        self._max_pending = max_pending
        self._num_pending = 0

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it in the pool. A caller that goes away does not interrupt it."""
        if self._num_pending >= self._max_pending:
            raise Exhausted(
                "too many calls at once", reason="TOO_MANY_CALLS", retry_after_s=_RETRY_S
            )
        self._num_pending += 1
        future = self._executor.submit(function, *args, **kwargs)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_soon(loop, self._ended))
        return await asyncio.wrap_future(future)

    def _ended(self) -> None:
        self._num_pending -= 1

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class Watchers:
    """Open watch streams: at most so many, and told when the service stops."""

    def __init__(self, max_watchers: int = MAX_WATCHERS) -> None:
        self._max_watchers = max_watchers
        self._num_watchers = 0
        self._stopping = asyncio.Event()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Scope of one stream. Raises Exhausted (TOO_MANY_WATCHERS)."""
        if self._num_watchers >= self._max_watchers:
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
        """Raises Unavailable (SHUTTING_DOWN) once the service stops."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return
        raise Unavailable("the service is shutting down; watch again", reason="SHUTTING_DOWN")

    def stop(self) -> None:
        self._stopping.set()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
