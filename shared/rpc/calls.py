"""Tracks the running calls of a server, so that they can be ended with a reason that the client can read."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.errors import Unavailable

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
