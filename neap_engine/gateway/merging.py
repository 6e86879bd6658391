"""Merges the events of several generations into one stream, beginning before the first token."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from neap_client import AsyncGenerationStream, AsyncNeapClient
from neap_client.inference.v1.inference_pb2 import GenerateResponse, Started

# Calls of one request. The others follow as these end.
CALLS_AT_ONCE = 16


class EarlyStream:
    """A stream that says at once that a worker has accepted the request: if that call is repeated before the first
    token, another Started follows. `deadline_s` in `time.monotonic()` seconds; `options` are those of the client's
    `generate`."""

    def __init__(self, workers: AsyncNeapClient, call: bytes, *, deadline_s: float, **options: Any) -> None:
        self._accepted: asyncio.Future[GenerateResponse] = asyncio.get_running_loop().create_future()
        self._open = partial(workers.generate, call, on_started=self._accept, **options)
        self._deadline_s = deadline_s
        self._stream: AsyncGenerationStream | None = None

    @property
    def resumptions(self) -> Sequence[Started]:
        return () if self._stream is None else self._stream.resumptions

    def _accept(self, started: Started) -> None:
        if not self._accepted.done():
            self._accepted.set_result(GenerateResponse(started=started))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    async def events(self) -> AsyncGenerator[GenerateResponse, None]:
        """Call a worker, and yield what comes."""
        stream = self._stream = self._open(timeout_s=max(0.0, self._deadline_s - time.monotonic()))
        begun = asyncio.create_task(stream.start())
        try:
            await asyncio.wait((begun, self._accepted), return_when=asyncio.FIRST_COMPLETED)
            if self._accepted.done():
                yield self._accepted.result()
            await begun
        finally:
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
        async for event in stream:
            yield event


async def merged(streams: Sequence[EarlyStream]) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
    """Yield (index of the stream, event) as events come. The first error of a stream ends all.
    Leaving closes the streams. So many run at once as one request may take of the workers.

    A reader that takes no events holds up the streams, which pauses their calls on the workers.
    """
    # None: a stream has ended.
    places = asyncio.Semaphore(CALLS_AT_ONCE)
    queue = asyncio.Queue[tuple[int, GenerateResponse] | Exception | None](len(streams))

    async def forward(index: int, stream: EarlyStream) -> None:
        try:
            async with places, aclosing(stream.events()) as events:
                async for event in events:
                    await queue.put((index, event))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks: list[asyncio.Task[None]] = []
    try:
        if len(streams) == 1:  # without a task and a queue for each token
            async with aclosing(streams[0].events()) as events:
                async for event in events:
                    yield 0, event
            return
        tasks += [asyncio.create_task(forward(*numbered)) for numbered in enumerate(streams)]
        num_open = len(tasks)
        while num_open:
            received = await queue.get()
            if isinstance(received, Exception):
                raise received
            if received is None:
                num_open -= 1
            else:
                yield received
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            stream.close()
