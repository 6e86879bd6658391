"""Merges the events of several calls into one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (index of the stream, item) as items come. The first error of a stream ends all. Leaving closes the streams.

    A reader that takes no items holds up the streams, which pauses their calls on the workers.
    """
    if len(streams) == 1:  # without a task and a queue for each token
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    # None: a stream has ended.
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(len(streams))

    async def forward(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(forward(*numbered)) for numbered in enumerate(streams)]
    num_open = len(tasks)
    try:
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
