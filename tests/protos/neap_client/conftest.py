"""Fixtures: a scripted service, and both clients behind one synchronous face, so that each test holds for both."""

import asyncio
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from neap_client import AsyncNeapClient, NeapClient

from tests.shared.rpc.conftest import scripted, server  # noqa: F401 (fixtures)

END = object()


class Blocking:
    """Lets a test call what it wraps, which belongs to `loop` in another thread, as if it were synchronous."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wrapped: Any) -> None:
        self._loop, self._wrapped = loop, wrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if not callable(found):
            return found

        def call(*given: Any, **named: Any) -> Any:
            async def called() -> Any:
                result = found(*given, **named)
                return await result if inspect.isawaitable(result) else result

            result = asyncio.run_coroutine_threadsafe(called(), self._loop).result(120)
            return Blocking(self._loop, result) if hasattr(result, "__anext__") else result

        return call

    def __iter__(self) -> "Blocking":
        return self

    def __next__(self) -> Any:
        async def following() -> Any:
            return await anext(self._wrapped, END)

        event = asyncio.run_coroutine_threadsafe(following(), self._loop).result(120)
        if event is END:
            raise StopIteration
        return event

    def __enter__(self) -> "Blocking":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def blocking_client(target: str, **options: Any) -> Iterator[Blocking]:
    """An AsyncNeapClient in a thread with an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def made() -> AsyncNeapClient:
        return AsyncNeapClient(target, **options)

    try:
        with Blocking(loop, asyncio.run_coroutine_threadsafe(made(), loop).result(60)) as client:
            yield client
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.fixture(params=[NeapClient, blocking_client], ids=["sync", "async"])
def make_client(request: pytest.FixtureRequest) -> Any:
    """Makes a client of either kind from the arguments of NeapClient, as a context manager."""
    return request.param
