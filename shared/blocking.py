"""Runs blocking calls from asyncio in bounded thread pools, one pool per purpose."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from shared.errors import Cancelled, Exhausted

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS = 8
MAX_PENDING_CALLS = 256
_RETRY_S = 1.0
# Set once nobody waits any more for the call that this thread runs.
_abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)


def check_wanted() -> None:
    """For long work, between its parts. Raises Cancelled if the caller that waited for it in a pool has gone."""
    abandoned = _abandoned.get()
    if abandoned is not None and abandoned.is_set():
        raise Cancelled("the caller has gone", reason="CLIENT_GONE")


class BlockingPool:
    """A thread pool whose queue is bounded: `call` raises Exhausted (TOO_MANY_CALLS) if too many calls are pending, or
    if its own has not begun after `max_wait_s`.

    `name` is the prefix of the names of its threads.
    """

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        max_pending: int = MAX_PENDING_CALLS,
        *,
        name: str = "blocking",
        max_wait_s: float | None = None,
    ) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_pending = max_pending
        self._max_wait_s = max_wait_s
        self._num_pending = 0

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the pool. Cancelling the caller drops a call that has not begun; one that runs ends at its
        next `check_wanted`, if it has any."""
        if self._num_pending >= self._max_pending:
            raise _too_many_calls_error()
        self._num_pending += 1
        abandoned = threading.Event()

        def run() -> T:
            _abandoned.set(abandoned)
            return function(*args, **kwargs)

        future = self._executor.submit(run)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_soon(loop, self._ended))
        is_withdrawn = False

        def withdraw() -> None:
            nonlocal is_withdrawn
            is_withdrawn = future.cancel()  # has no effect on a call that has begun

        timer = None if self._max_wait_s is None else loop.call_later(self._max_wait_s, withdraw)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            abandoned.set()
            if is_withdrawn:
                raise _too_many_calls_error() from None
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _ended(self) -> None:
        self._num_pending -= 1

    def close(self, *, wait: bool = True) -> None:
        """Drop calls that have not begun. With `wait`, return only once the running calls have ended."""
        self._executor.shutdown(wait=wait, cancel_futures=True)


def _too_many_calls_error() -> Exhausted:
    return Exhausted("too many calls at once", reason="TOO_MANY_CALLS", retry_after_s=_RETRY_S)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
