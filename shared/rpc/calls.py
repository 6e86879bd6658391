"""The calls a server is at work on, so that they can be ended with a reason the client can read."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.errors import Unavailable


class OpenCalls:
    """Belongs to one event loop. gRPC's own `stop` would end calls without saying why."""

    def __init__(self) -> None:
        self._methods: dict[asyncio.Task[Any], str] = {}
        self._ended: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._methods)

    @contextmanager
    def one(self, method: str) -> Iterator[None]:
        """Around the handler of a call of `method` ("/package.Service/Method"), in the call's own task.

        Raises Unavailable (reason SHUTTING_DOWN) in place of the cancellation when `end` ended the call.
        """
        task = asyncio.current_task()
        assert task is not None
        self._methods[task] = method
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise Unavailable(
                "the service is stopping; the call may be repeated elsewhere",
                reason="SHUTTING_DOWN",
            ) from None
        finally:
            del self._methods[task]
            self._ended.discard(task)

    def end(self, prefixes: tuple[str, ...] = ("/",)) -> int:
        """End the calls of methods that start with one of `prefixes`, each with UNAVAILABLE. How many there were."""
        tasks = [task for task, method in self._methods.items() if method.startswith(prefixes)]
        for task in tasks:
            self._ended.add(task)
            task.cancel()
        return len(tasks)
