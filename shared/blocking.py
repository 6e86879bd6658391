"""Runs blocking calls from asyncio in bounded thread pools, one pool per purpose."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
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

    `name` is the prefix of the names of its threads. `client` names whoever a call is for, "" if that is not known: one
    client has half of the threads and of the queue at most, so that others find a thread free.
    """

    def __init__(
        self,
        num_threads: int = NUM_THREADS,
        max_pending: int = MAX_PENDING_CALLS,
        *,
        name: str = "blocking",
        max_wait_s: float | None = None,
        client: Callable[[], str] = lambda: "",
    ) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_pending = max_pending
        self._max_wait_s = max_wait_s
        self._num_pending = 0
        self._client = client
        self._share = max(1, num_threads // 2)
        self._max_per_client = max(1, max_pending // 2)
        # client -> its calls, and what lets its share of them run; only clients that have calls.
        self._calls: Counter[str] = Counter()
        self._shares: dict[str, asyncio.Semaphore] = {}

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the pool. Cancelling the caller drops a call that has not begun; one that runs ends at its
        next `check_wanted`, if it has any."""
        client = self._client()
        most = self._max_per_client if client else self._max_pending
        if self._num_pending >= self._max_pending or self._calls[client] >= most:
            raise _too_many_calls_error()
        self._num_pending += 1
        self._calls[client] += 1
        # Callers that are not known are limited by the threads.
        share = self._shares.setdefault(client, asyncio.Semaphore(self._share)) if client else None
        loop = asyncio.get_running_loop()
        give_up_at_s = math.inf if self._max_wait_s is None else loop.time() + self._max_wait_s
        try:
            if share is not None:
                await asyncio.wait_for(share.acquire(), self._max_wait_s)
        except BaseException as error:
            self._ended(client, None)
            raise _too_many_calls_error() if isinstance(error, TimeoutError) else error from None
        abandoned = threading.Event()

        def run() -> T:
            _abandoned.set(abandoned)
            return function(*args, **kwargs)

        future = self._executor.submit(run)
        future.add_done_callback(lambda _: _call_soon(loop, partial(self._ended, client, share)))
        is_withdrawn = False

        def withdraw() -> None:
            nonlocal is_withdrawn
            is_withdrawn = future.cancel()  # has no effect on a call that has begun

        timer = None if self._max_wait_s is None else loop.call_at(give_up_at_s, withdraw)
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

    def _ended(self, client: str, share: asyncio.Semaphore | None) -> None:
        """The call is over, which may be long after its caller has gone."""
        self._num_pending -= 1
        self._calls[client] -= 1
        if share is not None:
            share.release()
        if not self._calls[client]:
            del self._calls[client]
            self._shares.pop(client, None)

    def close(self, *, wait: bool = True) -> None:
        """Drop calls that have not begun. With `wait`, return only once the running calls have ended."""
        self._executor.shutdown(wait=wait, cancel_futures=True)


def _too_many_calls_error() -> Exhausted:
    return Exhausted("too many calls at once", reason="TOO_MANY_CALLS", retry_after_s=_RETRY_S)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
