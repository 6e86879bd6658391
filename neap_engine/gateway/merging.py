"""Merges the events of several generations into one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from neap_client import AsyncGenerationStream
from neap_client.inference.v1.inference_pb2 import GenerateResponse


async def merged(streams: Sequence[AsyncGenerationStream]) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
    """Yield (index of the stream, event) as events come. The first error of a stream ends all.
    Leaving closes the streams.

    A reader that takes no events holds up the streams, which pauses their calls on the workers.
    """
    # None: a stream has ended.
    queue = asyncio.Queue[tuple[int, GenerateResponse] | Exception | None](len(streams))

    async def forward(index: int, stream: AsyncGenerationStream) -> None:
        try:
            async for event in stream:
                await queue.put((index, event))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks: list[asyncio.Task[None]] = []
    try:
        if len(streams) == 1:  # without a task and a queue for each token
            async for event in streams[0]:
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
