"""Parses bodies in a thread, because one of several megabytes takes longer than other requests should wait."""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from shared.blocking import BlockingPool
from shared.errors import NeapError

# A body of this size takes at most a few milliseconds.
INLINE_BYTES = 16 * 1024


T = TypeVar("T")


class BodyParser:
    """Parses one large body at a time. Clients take turns: those with many large bodies do not hold up the others."""

    def __init__(self) -> None:
        self._pool = BlockingPool(1, name="gateway-parser")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def parse(self, client: str, body: bytes, parse: Callable[[bytes], T]) -> T:
        """Raises as `parse` does."""
        if len(body) <= INLINE_BYTES:
            return parse(body)
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = asyncio.Lock()
        async with turn:
            parsed = await self._pool.call(_parsed, body, parse)
        if isinstance(parsed, NeapError):
            raise parsed
        return parsed


def _parsed(body: bytes, parse: Callable[[bytes], T]) -> T | NeapError:
    try:
        return parse(body)
    except NeapError as error:
        # Its traceback and its cause hold the parsed body, until the client has read the answer.
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
