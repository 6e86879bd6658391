"""The stream of one generation for asyncio."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from neap_client.errors import NeapError
from neap_client.generation import GenerationCalls
from neap_client.inference.v1.inference_pb2 import GenerateResponse
from neap_client.retry import repeat_async
from neap_client.status import from_rpc_error


class AsyncGenerationStream(GenerationCalls, AsyncIterator[GenerateResponse]):
    """Iterates asynchronously over Started, token chunks and Finished, with the rules of GenerationStream.

    Only one task may iterate. Cancelling that task cancels the call; so does leaving an `async with` block of the
    stream.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._closing = asyncio.Event()
        super().__init__(*args, **options)

    async def start(self) -> None:
        """Wait for the first chunk, repeating the call if necessary. Iterating does this by itself."""
        if not self._has_begun:
            self._has_begun = True
            await repeat_async(self._attempt, self._attempts, sleep=self._wait)

    async def __anext__(self) -> GenerateResponse:
        await self.start()
        if self._is_closed:
            raise StopAsyncIteration
        event = self._held.popleft() if self._held else await self._go_on()
        if event is None:
            raise StopAsyncIteration
        return self._record(event)

    def close(self) -> None:
        super().close()
        self._closing.set()

    async def __aenter__(self) -> "AsyncGenerationStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _attempt(self) -> None:
        """Receive events up to the first one that is not Started, or up to the end of the stream."""
        self._begin_attempt()
        try:
            while self._lacks_chunk:
                event = await self._receive()
                if event is None:
                    return
                self._hold(event)
        except NeapError as error:
            if not self._was_refused(error):
                raise
            await self._attempt()

    async def _go_on(self) -> GenerateResponse | None:
        """Receive the next event, from another call if this one is interrupted. None at the end of the stream."""
        try:
            return await self._receive()
        except NeapError as error:
            if self.finished is not None:  # the answer is whole, whatever became of its call
                return None
            attempts, wait_s = self._attempts_after(error)
        await self._wait(wait_s)
        await repeat_async(self._attempt, attempts, sleep=self._wait)
        return self._held.popleft() if self._held else await self._receive()

    async def _receive(self) -> GenerateResponse | None:
        """Return the next event, or None at the end of the stream."""
        timeout_s = self._event_timeout_s
        try:
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                event = await self._call.read()
        except TimeoutError as error:
            raise self._stalled() from error
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            # gRPC raises this also where `close` has cancelled the call and nobody has cancelled this task.
            if self._is_closed and not _is_being_cancelled():
                return None
            raise
        return None if event is grpc.aio.EOF else event

    async def _wait(self, seconds: float) -> None:
        """Wait until `close` is called, for at most `seconds`."""
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
