"""Parses bodies in a thread, because one of several megabytes takes longer than other requests should wait."""

import asyncio
from weakref import WeakValueDictionary

from neap_engine.gateway.requests import RequestedGeneration, parse_generation
from shared.blocking import BlockingPool
from shared.errors import NeapError

# A body of this size takes at most a few milliseconds.
INLINE_BYTES = 16 * 1024


class BodyParser:
    """Parses one large body at a time. Clients take turns: those with many large bodies do not hold up the others."""

    def __init__(self, max_choices: int) -> None:
        self._max_choices = max_choices
        self._pool = BlockingPool(1, name="gateway-parser")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def parse(self, client: str, body: bytes, *, is_chat: bool) -> RequestedGeneration:
        """Raises as `parse_generation` does."""
        if len(body) <= INLINE_BYTES:
            return parse_generation(body, is_chat=is_chat, max_choices=self._max_choices)
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = asyncio.Lock()
        async with turn:
            parsed = await self._pool.call(self._parse, body, is_chat)
        if isinstance(parsed, NeapError):
            raise parsed
        return parsed

    def _parse(self, body: bytes, is_chat: bool) -> RequestedGeneration | NeapError:
        try:
            return parse_generation(body, is_chat=is_chat, max_choices=self._max_choices)
        except NeapError as error:
            # Its traceback and its cause hold the parsed body, until the client has read the answer.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
