"""The calls a server is at work on, so that they can be ended with a reason the client can read."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.errors import Unavailable

ALL = ("/",)


class OpenCalls:
    """Belongs to one event loop. gRPC's own `stop` would end calls without saying why."""

    def __init__(self) -> None:
        self._methods: dict[asyncio.Task[Any], str] = {}
        self._ended: set[asyncio.Task[Any]] = set()
        self._is_over = False
        self._idle, self._has_begun = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._untold = 0
        self._all_told = asyncio.Event()
        self._all_told.set()

    def __len__(self) -> int:
        return len(self._methods)

    async def idle_for(self, seconds: float) -> None:
        """Returns once no handler has been at work for so long."""
        while True:
            await self._idle.wait()
            self._has_begun.clear()
            try:
                await asyncio.wait_for(self._has_begun.wait(), seconds)
            except TimeoutError:
                return

    @contextmanager
    def one(self, method: str) -> Iterator[None]:
        """Around the handler of a call of `method` ("/package.Service/Method"), in the call's own task.

        Raises Unavailable (reason SHUTTING_DOWN) in place of the cancellation when `end` ended the call, and at once when `end`
        has ended all calls before.
        """
        task = asyncio.current_task()
        assert task is not None
        if self._is_over:
            raise stopping()
        self._methods[task] = method
        self._idle.clear()
        self._has_begun.set()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise stopping() from None
        finally:
            del self._methods[task]
            self._ended.discard(task)
            if not self._methods:
                self._idle.set()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Around all of a call, its answer or status included, in the call's own task: `all_told` waits for it."""
        self._untold += 1
        self._all_told.clear()
        try:
            yield
        finally:
            self._untold -= 1
            if not self._untold:
                self._all_told.set()

    async def all_told(self, timeout_s: float) -> bool:
        """Returns once no call is open, or after `timeout_s`; whether none is."""
        try:
            await asyncio.wait_for(self._all_told.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end(self, prefixes: tuple[str, ...] = ALL) -> int:
        """End the calls of methods that start with one of `prefixes`, each with UNAVAILABLE. How many there were.

        Once all methods have been ended, calls that come later are refused in the same way.
        """
        self._is_over = self._is_over or prefixes == ALL
        tasks = [task for task, method in self._methods.items() if method.startswith(prefixes)]
        for task in tasks:
            self._ended.add(task)
            task.cancel()
        return len(tasks)


def stopping() -> Unavailable:
    """What a call is told that the end of the server ends."""
    return Unavailable(
        "the service is stopping; the call may be repeated elsewhere", reason="SHUTTING_DOWN"
    )
