"""Decides which failed calls are repeated, and after how long."""

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


def retrying(
    may_repeat: Callable[[BaseException], bool],
    *,
    num_attempts: int,
    deadline_s: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
) -> Retrying:
    """Return a Retrying that makes a call up to `num_attempts` times and then raises the error of the last attempt.

    `deadline_s` is in `time.monotonic()` seconds. If the next attempt would be after it, the error is raised at once.
    """

    return Retrying(
        retry=retry_if_exception(may_repeat),
        stop=stop_after_attempt(num_attempts) | _TooLate(deadline_s),
        wait=_wait_s,
        sleep=sleep,
        reraise=True,
    )


class _TooLate(stop_base):
    """Stops if the next attempt would be after the deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def __call__(self, retry_state: RetryCallState) -> bool:
        return time.monotonic() + retry_state.upcoming_sleep >= self._deadline_s


def _wait_s(state: RetryCallState) -> float:
    """Return the delay in seconds: at least the retry delay of the service, plus random jitter that grows with each attempt.

    The jitter spreads clients that were refused at the same time.
    """
    assert state.outcome is not None
    error = state.outcome.exception()
    asked_s = error.retry_after_s if isinstance(error, Exhausted) else None
    if asked_s is None:
        return _backoff_s(state)
    return asked_s * random.uniform(1.0, 1.0 + state.attempt_number) + _backoff_s(state)
