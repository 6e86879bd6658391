"""What calls for asyncio do otherwise than the synchronous ones of `sync_calls`, which has the same names."""

import asyncio
import math
from asyncio import sleep as sleep
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from neap_client.channel import open_async_channel as open_channel
from neap_client.status import from_rpc_error

__all__ = ["EventReader", "called", "open_channel", "read", "sleep"]

T = TypeVar("T")


async def called(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call. Raises NeapError as the service raised it."""
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def read(call: Any) -> Any:
    """Return the next message of a stream, None at its end. Raises NeapError as the service raised it."""
    message = await called(call.read)
    return None if message is grpc.aio.EOF else message


class EventReader:
    """Reads the events of one stream's calls, and waits between them. `close` ends both."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()

    def close(self) -> None:
        self._closing.set()

    async def read(self, call: Any, timeout_s: float) -> Any:
        """Return the next event, None at the end.
        Raises NeapError as the service raised it, TimeoutError if it takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                return await read(call)
        except asyncio.CancelledError:
            # gRPC raises this also where `close` has cancelled the call and nobody has cancelled this task.
            if self._closing.is_set() and not _is_being_cancelled():
                return None
            raise

    async def wait(self, seconds: float) -> None:
        """Wait until `close` is called, for at most `seconds`."""
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
