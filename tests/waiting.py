"""Waiting until other threads, tasks or processes have brought a condition about."""

import asyncio
import inspect
import time
from collections.abc import Callable

# A test's own limit (pytest-timeout) is longer, so that the assertion below names the condition.
TIMEOUT_S = 120.0
PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1


def wait_until(condition: Callable[[], object], *, timeout_s: float = TIMEOUT_S) -> None:
    """Calls `condition` until its result is true. Fails the test after `timeout_s`."""
    give_up_at_s = time.monotonic() + timeout_s
    while True:
        asked_at_s = time.monotonic()
        if condition():
            return
        assert time.monotonic() < give_up_at_s, f"{condition} has not become true"
        time.sleep(_pause_s(asked_at_s))


async def wait_until_async(condition: Callable[[], object], *, timeout_s: float = TIMEOUT_S) -> None:
    """`wait_until` on an event loop. `condition` may return an awaitable; then its result counts."""
    give_up_at_s = time.monotonic() + timeout_s
    while True:
        asked_at_s = time.monotonic()
        result = condition()
        if await result if inspect.isawaitable(result) else result:
            return
        assert time.monotonic() < give_up_at_s, f"{condition} has not become true"
        await asyncio.sleep(_pause_s(asked_at_s))


def _pause_s(asked_at_s: float) -> float:
    """A condition that takes long, as a request does, is not asked all the time: others need the processor."""
    return min(LONGEST_PAUSE_S, max(PAUSE_S, 4 * (time.monotonic() - asked_at_s)))
