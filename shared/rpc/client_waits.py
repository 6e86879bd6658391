"""How long a server waits for its clients."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from shared.errors import DeadlineExceeded, Exhausted, InvalidInput, NeapError
from shared.rpc.calls import stopping

# While the server drains: a request message that is on its way arrives within that time.
DRAIN_REQUEST_S = 0.5
MAX_AWAITED_REQUESTS = 1000
CANCELLATION_S = 0.05
# While the server drains: how long a client that reads may take to make room for what is next.
DELIVERY_TIMEOUT_S = 5.0
_RETRY_S = 1.0

T = TypeVar("T")


class _Wait:
    """`error` is raised when `timeout` expires."""

    def __init__(self, timeout_s: float | None, error: NeapError) -> None:
        self.began_s = asyncio.get_running_loop().time()
        self.timeout = asyncio.timeout(timeout_s)
        self.error = error

    def end_by(self, when_s: float, error: NeapError) -> None:
        """Expires at `when_s` on the loop's clock, unless it does so earlier."""
        planned_s = self.timeout.when()
        if not self.timeout.expired() and (planned_s is None or when_s < planned_s):
            self.error = error
            self.timeout.reschedule(when_s)


class ClientWaits:
    """Bounds every wait for a client. Belongs to one event loop.

    gRPC announces a call before its request message has arrived, and waits for that message without limit. Here a call whose
    message has not come after `request_timeout_s` ends with DEADLINE_EXCEEDED (reason REQUEST_TIMEOUT). Of more than
    `max_awaited` calls that wait for their message, the oldest ends with RESOURCE_EXHAUSTED (reason TOO_MANY_IDLE_CALLS), so
    that clients which send their message always get in. `unsent` counts the calls that ended without a request, by reason.

    A write returns once gRPC has room for what is written, which for a client that does not read is never. `delivery_timeout_s`
    is how long a write may take while the server drains.
    """

    def __init__(
        self,
        request_timeout_s: float = 30.0,
        max_awaited: int = MAX_AWAITED_REQUESTS,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
    ) -> None:
        self.unsent: Counter[str] = Counter()
        self.delivery_timeout_s = delivery_timeout_s
        self._deliveries: set[_Wait] = set()
        self._request_timeout_s = request_timeout_s
        self._max_awaited = max_awaited
        self._requests: dict[_Wait, None] = {}
        self._is_draining = False

    @property
    def num_awaited(self) -> int:
        """Calls whose request message has not come yet."""
        return len(self._requests)

    def drain(self) -> None:
        """From now on wait for requests for `DRAIN_REQUEST_S` only; calls that have waited that long end now (SHUTTING_DOWN).

        Writes that wait for a client to read get `delivery_timeout_s` from now.
        """
        self._is_draining = True
        now_s = asyncio.get_running_loop().time()
        for wait in self._deliveries:
            wait.end_by(now_s + self.delivery_timeout_s, slow_reader(self.delivery_timeout_s))
        for wait in self._requests:
            wait.end_by(wait.began_s + DRAIN_REQUEST_S, stopping())

    async def request(self, read: Callable[[], Awaitable[T]]) -> T:
        """The message that `read` (`ServicerContext.read`) brings, or `grpc.aio.EOF` where the client sends no more.

        Raises DeadlineExceeded (REQUEST_TIMEOUT), Exhausted (TOO_MANY_IDLE_CALLS), Unavailable (SHUTTING_DOWN).
        """
        if len(self._requests) >= self._max_awaited:
            oldest = next(iter(self._requests))
            oldest.end_by(asyncio.get_running_loop().time(), _too_many(self._max_awaited))
            del self._requests[oldest]
        wait = _Wait(self._request_timeout_s, _too_late(self._request_timeout_s))
        self._requests[wait] = None
        try:
            async with wait.timeout:
                if self._is_draining:
                    wait.end_by(wait.began_s + DRAIN_REQUEST_S, stopping())
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
        """`request` for calls that have exactly one. Raises InvalidInput (REQUEST_MISSING) for none."""
        message = await self.request(read)
        if message is grpc.aio.EOF:
            await self._told_if_cancelled()
            self.unsent["REQUEST_MISSING"] += 1
            raise InvalidInput("the call was closed without a request", reason="REQUEST_MISSING")
        return message

    async def delivery(self, write: Awaitable[None], timeout_s: float | None = None) -> None:
        """Awaits `write`, for `timeout_s` at most (None: no limit), and while the server drains for `delivery_timeout_s`.

        Raises Exhausted (SLOW_READER).
        """
        wait = _Wait(timeout_s, slow_reader(timeout_s or math.inf))
        self._deliveries.add(wait)
        try:
            async with wait.timeout:
                if self._is_draining:
                    wait.end_by(
                        wait.began_s + self.delivery_timeout_s, slow_reader(self.delivery_timeout_s)
                    )
                await write
        except TimeoutError:
            raise wait.error from None
        finally:
            self._deliveries.remove(wait)

    async def _told_if_cancelled(self) -> None:
        # gRPC reports a cancelled call as one without further messages, and an instant later cancels the task.
        try:
            await asyncio.sleep(CANCELLATION_S)
        except asyncio.CancelledError:
            self._cancelled()
            raise

    def _cancelled(self) -> None:
        # By the client or, at the end of a drain, by the server.
        self.unsent["SHUTTING_DOWN" if self._is_draining else "CANCELLED"] += 1


def _too_late(timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"no request came within {timeout_s:g} s of the call's opening", reason="REQUEST_TIMEOUT"
    )


def _too_many(limit: int) -> Exhausted:
    return Exhausted(
        f"more than {limit} calls are open that have sent no request; the oldest is ended",
        reason="TOO_MANY_IDLE_CALLS",
        retry_after_s=_RETRY_S,
    )


def slow_reader(timeout_s: float) -> Exhausted:
    """The client has not read for that long."""
    return Exhausted(f"the client has not read for {timeout_s:g} s", reason="SLOW_READER")
