"""One request as its caller sees it."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

from inference_service.engine.request.request import Finished, GenerationEvent, GenerationRequest
from shared.errors import DeadlineExceeded, NeapError

# None: the generation has ended, after Finished or after an error.
EngineEvent = GenerationEvent | NeapError | None
OnEvent = Callable[[EngineEvent], None]


class GenerationHandle:
    """Thread-safe. Events come either to `on_event`, called by the engine's thread, or through `events()`."""

    def __init__(
        self, request: GenerationRequest, wake: Callable[[], None], on_event: OnEvent | None
    ) -> None:
        self.request = request
        self.submitted_s = time.monotonic()
        # When the engine took it up; None while it waits.
        self.started_s: float | None = None
        self._wake = wake
        self._events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self._deliver = on_event or self._events.put
        self._cancelled = threading.Event()
        self._paused = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def is_paused(self) -> bool:
        return self._paused.is_set()

    def cancel(self) -> None:
        """Frees the slot within one step. Idempotent, and harmless once the generation has ended."""
        self._cancelled.set()
        self._wake()

    def pause(self) -> None:
        """No further step for this request until `resume`; its place and its cache stay."""
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()
        self._wake()

    def events(self) -> Iterator[GenerationEvent]:
        """Blocks for each event; the last is `Finished`. Raises `NeapError`. Leaving early cancels the generation."""
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
        """The next event, None at the end. Raises `DeadlineExceeded` if none came in time."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"no event within {timeout_s} s") from None

    def deliver(self, event: EngineEvent) -> None:
        """For the engine's thread alone."""
        self._deliver(event)
