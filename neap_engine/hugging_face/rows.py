"""Decodes several requests at once in an engine, token by token, until the caller stops each of them."""

import queue
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from shared.engine.engine import MAX_RUNNING, Engine
from shared.engine.request.handle import EngineEvent, GenerationHandle
from shared.engine.request.request import GeneratedToken, GenerationRequest, TokenChunk
from shared.errors import Exhausted, NeapError

# Called with a row and its next token. Returns whether that token ends the row.
OnToken = Callable[[int, GeneratedToken], bool]


def decode_rows(engine: Engine, requests: Sequence[GenerationRequest], on_token: OnToken) -> None:
    """Generates all requests, at most MAX_RUNNING at a time.
    Calls `on_token` in the calling thread, in each row's order.

    A row ends when `on_token` returns true or when its request ends. An error or an interrupt ends all rows. Raises as
    `Engine.submit`, but waits for rows of its own if the engine's queue is full.
    """
    events: queue.SimpleQueue[tuple[int, EngineEvent]] = queue.SimpleQueue()
    running: dict[int, GenerationHandle] = {}
    waiting = deque(enumerate(requests))

    def deliver(row: int, event: EngineEvent) -> None:
        events.put((row, event))

    def submit_waiting() -> None:
        while waiting and len(running) < MAX_RUNNING:
            row, request = waiting[0]
            try:
                running[row] = engine.submit(request, on_event=partial(deliver, row))
            except Exhausted as error:
                if running and error.retry_after_s is not None:
                    return
                raise
            waiting.popleft()

    try:
        submit_waiting()
        while running:
            row, event = events.get()
            if row not in running:  # it has ended; its last events were on their way
                continue
            if isinstance(event, NeapError):
                raise event
            if isinstance(event, TokenChunk):
                if not any(on_token(row, token) for token in event.tokens):
                    continue
                running[row].cancel()
            del running[row]
            submit_waiting()
    finally:
        for handle in running.values():
            handle.cancel()
