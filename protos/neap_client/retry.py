"""Decides which failed calls are repeated, and after how long."""

import math
import random
import re
import time
from collections.abc import Callable

from neap_client.errors import DeadlineExceeded, Exhausted, NeapError, Unavailable

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
# So many attempts at a request may be lost together with their workers, before it brings anything: it may be what ends
# them.
MAX_LOST = 2
# How gRPC describes a call that no worker has got.
_NOT_SENT = re.compile("failed to connect|connections to all backends|resolution|address list|no connection")
# A watch that is lost later than this after its opening was no failed attempt.
STEADY_S = 5.0


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


def was_lost(error: BaseException) -> bool:
    """Whether a worker had the call, and is gone."""
    is_transport = isinstance(error, Unavailable) and error.reason == "GRPC_UNAVAILABLE"
    return is_transport and not _NOT_SENT.search(str(error))


class Attempts:
    """Counts the attempts at one call and says how long to wait before the next one.

    No more than `max_lost` attempts may be lost with their workers. `deadline_s` is in `time.monotonic()` seconds; no
    attempt begins after it. `resumes`: the attempts go on with an answer that has begun, so it is the deadline that
    ends it where none is left, and not the worker that was lost.
    """

    def __init__(
        self,
        may_repeat: Callable[[BaseException], bool],
        *,
        num_attempts: float,
        max_lost: float = math.inf,
        deadline_s: float = math.inf,
        resumes: bool = False,
    ) -> None:
        self._left_to_lose = max_lost
        self._may_repeat = may_repeat
        self._num_attempts = num_attempts
        self._resumes = resumes
        self._deadline_s = deadline_s
        self._num_failed = 0

    def wait_s(self, error: NeapError) -> float:
        """Return the seconds to wait after an attempt that failed with `error`.
        Raises `error` if the call is not to be repeated, or DeadlineExceeded (see the class).

        The delay is at least the retry delay of the service, plus random jitter that grows with each attempt. The
        jitter spreads clients that were refused at the same time.
        """
        self._num_failed += 1
        if self._num_failed >= self._num_attempts or not self._may_repeat(error):
            raise error
        if was_lost(error):
            self._left_to_lose -= 1
            if self._left_to_lose <= 0:
                raise Unavailable(
                    f"the request was lost with every worker that had it, and is not repeated: {error.message}",
                    reason="LOST_WITH_WORKERS",
                ) from error
        delay_s = random.uniform(0.0, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._num_failed - 1, 30)))
        asked_s = error.retry_after_s if isinstance(error, Exhausted) else None
        if asked_s is not None:
            delay_s += asked_s * random.uniform(1.0, 1.0 + self._num_failed)
        if time.monotonic() + delay_s < self._deadline_s:
            return delay_s
        if self._resumes:
            why = f"the deadline leaves no time to resume the answer: {error.message}"
            raise DeadlineExceeded(why) from error
        raise error


class WatchAttempts:
    """Says when a watch opens its next stream after one was lost.

    Until its first message a watch has `num_attempts`, as any call has. After it the service may stop and start again:
    the watch goes on until `timeout_s`, None for no limit, has passed. Streams that are lost soon after their opening
    are failed attempts even if they had a message, because a service that is about to stop may send one on each.
    `on_lost` gets the first error of each outage.
    """

    def __init__(self, num_attempts: int, timeout_s: float | None, on_lost: Callable[[NeapError], object]) -> None:
        self._deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._on_lost = on_lost
        self._attempts = self._new_attempts(num_attempts)
        self._opened_s = 0.0
        self._has_begun = self._is_lost = False

    def _new_attempts(self, num_attempts: float) -> Attempts:
        return Attempts(was_not_started, num_attempts=num_attempts, deadline_s=self._deadline_s)

    def open(self) -> float | None:
        """Note that a stream is opened. Returns the seconds that it may take, None for no limit."""
        self._opened_s = time.monotonic()
        return None if self._deadline_s == math.inf else self._deadline_s - self._opened_s

    def note_message(self) -> None:
        if not self._has_begun:
            self._attempts = self._new_attempts(math.inf)
        self._has_begun = True

    def wait_s(self, error: NeapError) -> float:
        """Return the seconds until the next stream is to be opened. Raises `error` if none is."""
        if self._has_begun and time.monotonic() - self._opened_s > STEADY_S:
            self._attempts, self._is_lost = self._new_attempts(math.inf), False
        wait_s = self._attempts.wait_s(error)
        if self._has_begun and not self._is_lost:
            self._is_lost = True
            self._on_lost(error)
        return wait_s
