"""Decides which failed calls are repeated, and after how long."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from neap_client.errors import Exhausted, NeapError, Unavailable

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0

T = TypeVar("T")


def is_unavailable(error: BaseException) -> bool:
    """Whether to repeat a call that is safe to make twice."""
    return isinstance(error, Unavailable)


def was_not_started(error: BaseException) -> bool:
    """Whether the service has not begun the work: nobody answered, or the service was full and gave a retry delay.

    Without a retry delay, the service will not have room later either.
    """
    if isinstance(error, Exhausted):
        return error.retry_after_s is not None
    return is_unavailable(error)


class Attempts:
    """Counts the attempts at one call and says how long to wait before the next one.

    `deadline_s` is in `time.monotonic()` seconds; no attempt begins after it.
    """

    def __init__(
        self,
        may_repeat: Callable[[BaseException], bool],
        *,
        num_attempts: int,
        deadline_s: float = math.inf,
    ) -> None:
        self._may_repeat = may_repeat
        self._num_attempts = num_attempts
        self._deadline_s = deadline_s
        self._num_failed = 0

    def wait_s(self, error: NeapError) -> float:
        """Return the seconds to wait after an attempt that failed with `error`. Raises `error` if the call is not to be repeated.

        The delay is at least the retry delay of the service, plus random jitter that grows with each attempt. The jitter spreads
        clients that were refused at the same time.
        """
        self._num_failed += 1
        if self._num_failed >= self._num_attempts or not self._may_repeat(error):
            raise error
        delay_s = random.uniform(
            0.0, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (self._num_failed - 1))
        )
        asked_s = error.retry_after_s if isinstance(error, Exhausted) else None
        if asked_s is not None:
            delay_s += asked_s * random.uniform(1.0, 1.0 + self._num_failed)
        if time.monotonic() + delay_s >= self._deadline_s:
            raise error
        return delay_s


def repeat(
    call: Callable[[], T], attempts: Attempts, sleep: Callable[[float], object] = time.sleep
) -> T:
    """Make a call as often as `attempts` allows. Raises the error of the last attempt."""
    while True:
        try:
            return call()
        except NeapError as error:
            wait_s = attempts.wait_s(error)
        sleep(wait_s)


async def repeat_async(
    call: Callable[[], Awaitable[T]],
    attempts: Attempts,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """The same for a coroutine function."""
    while True:
        try:
            return await call()
        except NeapError as error:
            wait_s = attempts.wait_s(error)
        await sleep(wait_s)
