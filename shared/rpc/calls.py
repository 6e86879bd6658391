"""Tracks the running calls of a server, so that they can be ended with a reason that the client can read, and bounds
how long it waits for its clients."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc.aio

from shared.errors import DeadlineExceeded, Exhausted, InvalidInput, NeapError, Unavailable

ALL = ("/",)


class OpenCalls:
    """The running calls of one event loop. gRPC's own `stop` would end calls without a reason."""

    def __init__(self) -> None:
        self._methods: dict[asyncio.Task[Any], str] = {}
        self._ended: set[asyncio.Task[Any]] = set()
        self._refuses_calls = False
        self._idle, self._has_begun = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._num_unanswered = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    def __len__(self) -> int:
        return len(self._methods)

    async def wait_idle(self, seconds: float) -> None:
        """Return once no handler has run for `seconds`."""
        while True:
            await self._idle.wait()
            self._has_begun.clear()
            try:
                await asyncio.wait_for(self._has_begun.wait(), seconds)
            except TimeoutError:
                return

    @contextmanager
    def track_handler(self, method: str) -> Iterator[None]:
        """Track a call of `method` ("/package.Service/Method") while its handler runs in the block, in the call's own
        task.

        Raises Unavailable (reason SHUTTING_DOWN) instead of the cancellation if `end` ends the call. Raises it at once
        if `end` has already ended all calls.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._refuses_calls:
            raise stopping_error()
        self._methods[task] = method
        self._idle.clear()
        self._has_begun.set()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise stopping_error() from None
        finally:
            del self._methods[task]
            self._ended.discard(task)
            if not self._methods:
                self._idle.set()

    @contextmanager
    def track_answer(self) -> Iterator[None]:
        """Track a whole call, including the sending of its answer or status, for `wait_all_answered`.
        In the call's own task."""
        self._num_unanswered += 1
        self._all_answered.clear()
        try:
            yield
        finally:
            self._num_unanswered -= 1
            if not self._num_unanswered:
                self._all_answered.set()

    async def wait_all_answered(self, timeout_s: float) -> bool:
        """Wait until every call has been answered, for at most `timeout_s`. Returns False after the timeout."""
        try:
            await asyncio.wait_for(self._all_answered.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end(self, prefixes: tuple[str, ...] = ALL) -> int:
        """End the calls of methods that start with one of `prefixes` with UNAVAILABLE.
        Returns the number of these calls.

        After the calls of all methods have been ended, later calls are refused in the same way.
        """
        self._refuses_calls = self._refuses_calls or prefixes == ALL
        tasks = [task for task, method in self._methods.items() if method.startswith(prefixes)]
        for task in tasks:
            self._ended.add(task)
            task.cancel()
        return len(tasks)


def stopping_error() -> Unavailable:
    """Return the error for a call that ends because the server stops."""
    return Unavailable("the service is stopping; the call may be repeated elsewhere", reason="SHUTTING_DOWN")


# While the server drains, a call gets this long for its request message, which may already be under way.
DRAIN_REQUEST_S = 0.5
MAX_AWAITED_REQUESTS = 1000
CANCELLATION_S = 0.05
# While the server drains, a client gets this long to read enough that the next message can be sent.
DELIVERY_TIMEOUT_S = 5.0
_RETRY_S = 1.0

T = TypeVar("T")


class _Wait:
    """One bounded wait. `error` is raised when `timeout` expires."""

    def __init__(self, timeout_s: float | None, error: NeapError) -> None:
        self.began_s = asyncio.get_running_loop().time()
        self.timeout = asyncio.timeout(timeout_s)
        self.error = error

    def end_by(self, when_s: float, error: NeapError) -> None:
        """Let the wait expire at `when_s` on the loop's clock, unless it expires earlier."""
        planned_s = self.timeout.when()
        if not self.timeout.expired() and (planned_s is None or when_s < planned_s):
            self.error = error
            self.timeout.reschedule(when_s)


class ClientWaits:
    """Bounds every wait for a client of one event loop.

    gRPC starts a call before its request message has arrived and waits for that message without a limit. Here a call
    whose message has not arrived after `request_timeout_s` ends with DEADLINE_EXCEEDED (reason REQUEST_TIMEOUT). If
    more than MAX_AWAITED_REQUESTS calls wait for their message, the oldest ends with RESOURCE_EXHAUSTED (reason
    TOO_MANY_IDLE_CALLS), so that clients that send their message are always served. `unsent` counts the calls that
    ended without a request, by reason.

    A write returns once gRPC has buffer space for the message. If the client does not read, that never happens.
    `delivery_timeout_s` bounds each write while the server drains.
    """

    def __init__(self, request_timeout_s: float = 30.0, delivery_timeout_s: float = DELIVERY_TIMEOUT_S) -> None:
        self.unsent: Counter[str] = Counter()
        self.delivery_timeout_s = delivery_timeout_s
        self._deliveries: set[_Wait] = set()
        self._request_timeout_s = request_timeout_s
        self.max_awaited = MAX_AWAITED_REQUESTS
        self._requests: dict[_Wait, None] = {}
        self._is_draining = False

    @property
    def num_awaited(self) -> int:
        """Number of calls whose request message has not arrived yet."""
        return len(self._requests)

    def drain(self) -> None:
        """Wait only `DRAIN_REQUEST_S` for requests from now on.
        Calls that have waited that long end now (SHUTTING_DOWN).

        Writes that wait for a client to read get `delivery_timeout_s` from now on.
        """
        self._is_draining = True
        now_s = asyncio.get_running_loop().time()
        for wait in self._deliveries:
            wait.end_by(now_s + self.delivery_timeout_s, slow_reader_error(self.delivery_timeout_s))
        for wait in self._requests:
            wait.end_by(wait.began_s + DRAIN_REQUEST_S, stopping_error())

    async def request(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the next message from `read` (`ServicerContext.read`), or `grpc.aio.EOF` if the client sends no more.

        Raises DeadlineExceeded (REQUEST_TIMEOUT), Exhausted (TOO_MANY_IDLE_CALLS), Unavailable (SHUTTING_DOWN).
        """
        if len(self._requests) >= self.max_awaited:
            oldest = next(iter(self._requests))
            oldest.end_by(asyncio.get_running_loop().time(), _too_many(self.max_awaited))
            del self._requests[oldest]
        wait = _Wait(self._request_timeout_s, _too_late(self._request_timeout_s))
        self._requests[wait] = None
        try:
            async with wait.timeout:
                if self._is_draining:
                    wait.end_by(wait.began_s + DRAIN_REQUEST_S, stopping_error())
                return await read()
        except TimeoutError:
            self.unsent[wait.error.reason] += 1
            raise wait.error from None
        except asyncio.CancelledError:
            self._cancelled()
            raise
        finally:
            self._requests.pop(wait, None)

    async def only_request(self, read: Callable[[], Awaitable[T]]) -> T:
        """Like `request`, for calls with exactly one message.
        Raises InvalidInput (REQUEST_MISSING) if there is none."""
        message = await self.request(read)
        if message is grpc.aio.EOF:
            await self._raise_if_cancelled()
            self.unsent["REQUEST_MISSING"] += 1
            raise InvalidInput("the call was closed without a request", reason="REQUEST_MISSING")
        return message

    async def delivery(self, write: Awaitable[None], timeout_s: float | None = None) -> None:
        """Await `write` for at most `timeout_s` (None: no limit), and for at most `delivery_timeout_s` while the server
        drains.

        Raises Exhausted (SLOW_READER).
        """
        wait = _Wait(timeout_s, slow_reader_error(timeout_s or math.inf))
        self._deliveries.add(wait)
        try:
            async with wait.timeout:
                if self._is_draining:
                    wait.end_by(wait.began_s + self.delivery_timeout_s, slow_reader_error(self.delivery_timeout_s))
                await write
        except TimeoutError:
            raise wait.error from None
        finally:
            self._deliveries.remove(wait)

    async def _raise_if_cancelled(self) -> None:
        # For a cancelled call, gRPC first reports the end of its messages and cancels the task a moment later.
        try:
            await asyncio.sleep(CANCELLATION_S)
        except asyncio.CancelledError:
            self._cancelled()
            raise

    def _cancelled(self) -> None:
        # Cancelled by the client or, at the end of a drain, by the server.
        self.unsent["SHUTTING_DOWN" if self._is_draining else "CANCELLED"] += 1


def _too_late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"no request arrived within {timeout_s:g} s of the start of the call", reason="REQUEST_TIMEOUT"
    )


def _too_many(limit: int) -> Exhausted:
    return Exhausted(
        f"more than {limit} open calls have sent no request, so the oldest of them ends",
        reason="TOO_MANY_IDLE_CALLS",
        retry_after_s=_RETRY_S,
    )


def slow_reader_error(timeout_s: float) -> Exhausted:
    """Return the error for a client that has not read for `timeout_s`."""
    return Exhausted(f"the client has not read for {timeout_s:g} s", reason="SLOW_READER")
