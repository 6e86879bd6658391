"""Which failed calls may be made again, and after how long."""

import math
import random
import time
from collections.abc import Callable

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from shared.errors import Exhausted, Unavailable

_backoff_s = wait_random_exponential(multiplier=0.1, max=2.0)


def nobody_answered(error: BaseException) -> bool:
    """For calls that may be made twice."""
    return isinstance(error, Unavailable)


def nothing_was_begun(error: BaseException) -> bool:
    """Also a service that was full and says how long to wait. One that does not say so will not have room later, either."""
    if isinstance(error, Exhausted):
        return error.retry_after_s is not None
    return nobody_answered(error)


def retrying(
    may_repeat: Callable[[BaseException], bool],
    *,
    num_attempts: int,
    deadline_s: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
) -> Retrying:
    """Makes a call up to `num_attempts` times and then raises what the last one raised.

    `deadline_s` in `time.monotonic()` seconds: the error is raised at once where the next attempt would come after it.
    """

    return Retrying(
        retry=retry_if_exception(may_repeat),
        stop=stop_after_attempt(num_attempts) | _TooLate(deadline_s),
        wait=_wait_s,
        sleep=sleep,
        reraise=True,
    )


class _TooLate(stop_base):
    """Once the next attempt would come after the deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def __call__(self, retry_state: RetryCallState) -> bool:
        return time.monotonic() + retry_state.upcoming_sleep >= self._deadline_s


def _wait_s(state: RetryCallState) -> float:
    """Never less than the service asked for, and spread wider each time, so that those refused together come back apart."""
    assert state.outcome is not None
    error = state.outcome.exception()
    asked_s = error.retry_after_s if isinstance(error, Exhausted) else None
    if asked_s is None:
        return _backoff_s(state)
    return asked_s * random.uniform(1.0, 1.0 + state.attempt_number) + _backoff_s(state)
