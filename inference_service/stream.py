"""One generation's events, from the engine's thread to the event loop, bounded."""

import asyncio
import threading
from collections import deque
from typing import Protocol

from inference_service.engine.request.request import GenerationEvent
from shared.errors import NeapError


class Pausable(Protocol):
    """What the stream needs of a GenerationHandle. All thread-safe and idempotent."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def cancel(self) -> None: ...


class EventStream:
    """`push` is the engine's callback; `next` belongs to the event loop that made the stream.

    At `capacity` waiting events the sequence is paused, and resumed when half are gone, so that a client that does not read
    holds up nobody else and costs a bounded number of events. `close` cancels the sequence, also one that is attached later.
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
        """The sequence these events come from; events may have arrived before."""
        with self._lock:
            self._handle = handle
            self._pause_if_full()
            closed = self._closed
        if closed:
            handle.cancel()

    def push(self, event: GenerationEvent | NeapError | None) -> None:
        """An event, an error that ends the stream, or None: ended. Never waits for the reader; from any thread."""
        with self._lock:
            if self._closed:
                return
            self._events.append(event)
            self._pause_if_full()
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            self.close()  # the loop is gone, and with it everybody who might read

    def _pause_if_full(self) -> None:
        # Under the lock, as resuming is: a pause that overtakes a resume would last for ever.
        if self._handle is not None and not self._paused and len(self._events) >= self._capacity:
            self._paused = True
            self._handle.pause()

    async def next(self) -> GenerationEvent | None:
        """The next event, or None at the end. Raises the NeapError the engine reported."""
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
        """Nobody reads any more. Idempotent."""
        with self._lock:
            self._closed = True
            self._events.clear()
            handle = self._handle
        if handle is not None:
            handle.cancel()
