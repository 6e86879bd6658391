"""A bounded queue of one generation's events, from the engine's thread to the event loop."""

import asyncio
import threading
from collections import deque
from typing import Protocol

from shared.engine.request.request import GenerationEvent
from shared.errors import NeapError


class Pausable(Protocol):
    """The part of a GenerationHandle that the stream uses. All methods are thread-safe and idempotent."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def cancel(self) -> None: ...


class EventStream:
    """`push` is the engine's callback. Only the event loop that created the stream may call `next`.

    The request is paused when `capacity` events wait, and resumed when half of them are read. So a client that does not
    read delays no other client, and its events take bounded memory. `close` cancels the request, even if it is attached
    later.
    """

    def __init__(self, *, capacity: int = 32) -> None:
        self._loop = asyncio.get_running_loop()
        self._capacity = capacity
        self._lock = threading.Lock()
        self._events: deque[GenerationEvent | NeapError | None] = deque()
        self._arrived = asyncio.Event()
        self._handle: Pausable | None = None
        self._paused = False
        self._closed = False

    def attach(self, handle: Pausable) -> None:
        """Sets the handle of the request. Events may have arrived before."""
        with self._lock:
            self._handle = handle
            self._pause_if_full()
            closed = self._closed
        if closed:
            handle.cancel()

    def push(self, event: GenerationEvent | NeapError | None) -> None:
        """Adds an event, an error that ends the stream, or None at the end. Never waits for the reader.
        Any thread may call it."""
        with self._lock:
            if self._closed:
                return
            self._events.append(event)
            self._pause_if_full()
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            self.close()  # the loop is closed, so nothing can read the events

    def _pause_if_full(self) -> None:
        # Under the lock, like resuming. Otherwise a pause could follow a later resume and never end.
        if self._handle is not None and not self._paused and len(self._events) >= self._capacity:
            self._paused = True
            self._handle.pause()

    async def next(self) -> GenerationEvent | None:
        """Returns the next event, or None at the end. Raises the NeapError that the engine reported."""
        while True:
            with self._lock:
                if self._events:
                    event = self._events.popleft()
                    if self._paused and len(self._events) <= self._capacity // 2:
                        assert self._handle is not None
                        self._paused = False
                        self._handle.resume()
                    break
                self._arrived.clear()
            await self._arrived.wait()
        if isinstance(event, NeapError):
            raise event
        return event

    def close(self) -> None:
        """Drops all events and cancels the request. Idempotent."""
        with self._lock:
            self._closed = True
            self._events.clear()
            handle = self._handle
        if handle is not None:
            handle.cancel()
