"""The caller's handle of a request."""

import queue
import time
from collections.abc import Callable, Iterator

from torch import Tensor

from shared.engine.request.request import Finished, GenerationEvent, GenerationRequest
from shared.errors import DeadlineExceeded, NeapError

# None: the generation has ended, after Finished or after an error.
EngineEvent = GenerationEvent | NeapError | None
OnEvent = Callable[[EngineEvent], None]
AfterEvents = Callable[[], None]
# A position, and the states [N, 3, D] of the N tokens from there on, at the depths `captured_depths` and L.
OnStates = Callable[[int, Tensor], None]


class GenerationHandle:
    """Thread-safe. Events go to `on_event`, which the engine's thread calls, or, without it, to `events()` and
    `next_event`. It calls `after_events` once after the events of each step, for all requests that have the same.

    `on_states`: called by the engine's thread with the states of tokens that have been through every layer. Those of a
    cached prefix are left out.
    """

    def __init__(
        self,
        request: GenerationRequest,
        wake: Callable[[], None],
        on_event: OnEvent | None,
        on_states: OnStates | None = None,
        after_events: AfterEvents | None = None,
    ) -> None:
        self.request, self.on_states, self.after_events = request, on_states, after_events
        self.submitted_s = time.monotonic()
        # When the engine started it, in `time.monotonic()` seconds; None while it waits.
        self.started_s: float | None = None
        # What the caller has of the text already, token by token, if it resumes an answer.
        self.resumed_texts: list[str] = []
        # What of its constraint is not enforced.
        self.unenforced: list[str] = []
        self._wake = wake
        self._events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        # Hands an event to the caller. Only the engine's thread calls it.
        self.deliver: OnEvent = on_event or self._events.put
        self.is_cancelled = self.is_paused = False

    def cancel(self) -> None:
        """Ends the request within one step. Idempotent. Does nothing once the generation has ended."""
        self.is_cancelled = True
        self._wake()

    def pause(self) -> None:
        """Stops stepping this request until `resume`. It keeps its KV cache, and leaves its place to another."""
        self.is_paused = True
        self._wake()

    def resume(self) -> None:
        self.is_paused = False
        self._wake()

    def events(self) -> Iterator[GenerationEvent]:
        """Blocks for each event. The last one is `Finished`. Raises the `NeapError` that ends the request. Closing the
        iterator early cancels the generation."""
        try:
            while (event := self._events.get()) is not None:
                if isinstance(event, NeapError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self.cancel()

    def next_event(self, timeout_s: float) -> EngineEvent:
        """Returns the next event, None at the end. Raises `DeadlineExceeded` if none arrives within `timeout_s`."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"no event within {timeout_s} s") from None
