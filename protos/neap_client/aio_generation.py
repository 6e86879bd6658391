"""The stream of one generation: for asyncio here, and synchronous in `sync_generation`, which hatch_build.py makes of
this file."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from neap_client.aio_calls import EventReader, sleep
from neap_client.errors import NeapError
from neap_client.generation import GenerationCalls
from neap_client.inference.v1.inference_pb2 import GenerateResponse
from neap_client.retry import Attempts

T = TypeVar("T")


async def repeat(
    call: Callable[[], Awaitable[T]], attempts: Attempts, sleep: Callable[[float], Awaitable[object]] = sleep
) -> T:
    """Make a call as often as `attempts` allows. Raises the error of the last attempt."""
    while True:
        try:
            return await call()
        except NeapError as error:
            wait_s = attempts.wait_s(error)
        await sleep(wait_s)


class AsyncGenerationStream(GenerationCalls, AsyncIterator[GenerateResponse]):
    """Iterates over Started, token chunks and Finished. Raises NeapError as the service raised it.

    A call that fails with UNAVAILABLE, or with RESOURCE_EXHAUSTED and a retry delay, is repeated as long as no chunk
    has arrived. Started is held back until the first chunk, so it belongs to the call that delivers the tokens. An
    answer that UNAVAILABLE interrupts later, or whose worker hangs, is resumed by another call, as long as that brings
    it forward (MAX_RESUMPTIONS): the caller sees one stream. If that cannot be before the deadline, DeadlineExceeded is
    raised. Other failures are raised unchanged, and `token_ids` and `text` hold what arrived before; `started` and
    `finished` are None until they arrive. Leaving a `with` block of the stream cancels its call.

    With asyncio only one task may iterate, and cancelling it cancels the call. Without, only one thread may iterate,
    and any thread may `close`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._events = EventReader()
        super().__init__(*args, **options)

    async def start(self) -> None:
        """Wait for the first chunk, repeating the call if necessary. Iterating does this by itself."""
        if not self._has_begun:
            self._has_begun = True
            await repeat(self._attempt, self._attempts, sleep=self._events.wait)

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
        self._events.close()

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
        await self._events.wait(wait_s)
        await repeat(self._attempt, attempts, sleep=self._events.wait)
        return self._held.popleft() if self._held else await self._receive()

    async def _receive(self) -> GenerateResponse | None:
        """Return the next event, or None at the end of the stream."""
        try:
            event: GenerateResponse | None = await self._events.read(self._call, self._event_timeout_s)
        except TimeoutError as error:
            raise self._stalled() from error
        return event
