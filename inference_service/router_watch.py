"""Notices published routers and moved aliases, so that ladders are prepared before a request needs them."""

import random
import threading
import time
from collections.abc import Callable

import structlog

from shared.errors import NeapError
from shared.registry.registry import Registry

# How long one read of the event stream waits. After an answer the next read follows at once, after an error it follows
# a pause, which doubles with each further error.
WATCH_S = 1.0
PAUSE_S = 2.0
MAX_DOUBLINGS = 3
# Interval of the polls that complement the stream. Times 0.5 to 1.5, so that workers started together do not poll
# together.
POLL_S = 30.0

log = structlog.get_logger("neap.routers")


class RouterWatch:
    """A thread that follows one model's events, starting after the newest one. It calls `on_change` after new events
    and every `poll_s`, measured in seconds by `clock`.

    After an outage of the registry, or any other error, it continues after the last event that it has read, so that it
    misses none. `on_error` is called with the reason of each error, INTERNAL for an unexpected one. Requests do not
    depend on the watch, because they resolve their alias themselves.
    """

    def __init__(
        self,
        registry: Registry,
        model_id: str,
        on_change: Callable[[], object],
        *,
        watch_s: float = WATCH_S,
        pause_s: float = PAUSE_S,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
        on_error: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._registry = registry
        self._model_id = model_id
        self._on_change = on_change
        self._watch_s, self._pause_s, self._poll_s = watch_s, pause_s, poll_s
        self._clock, self._on_error = clock, on_error
        self._poll_at_s = clock() + self._jittered(poll_s)
        self._last_event: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neap-router-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current read of the stream. Does not wait for it, because the registry may hang."""
        self._stopping.set()

    def _run(self) -> None:
        num_errors = 0
        while not self._stopping.is_set():
            try:
                self._follow()
            except Exception as error:
                if self._stopping.is_set():
                    return
                self._report(error, is_first=num_errors == 0)
                pause_s = self._pause_s * 2 ** min(num_errors, MAX_DOUBLINGS)
                num_errors += 1
                self._stopping.wait(self._jittered(pause_s))
            else:
                if num_errors:
                    log.info("routers are watched again", model_id=self._model_id)
                num_errors = 0

    def _follow(self) -> None:
        if self._clock() >= self._poll_at_s:
            self._changed()
        if self._read_events():
            self._changed()

    def _changed(self) -> None:
        self._poll_at_s = self._clock() + self._jittered(self._poll_s)
        self._on_change()

    def _report(self, error: Exception, *, is_first: bool) -> None:
        """Logs the first of consecutive errors."""
        reason = error.reason if isinstance(error, NeapError) else "INTERNAL"
        self._on_error(reason)
        if is_first:
            log.warning(
                "routers cannot be watched",
                model_id=self._model_id,
                reason=reason,
                exc_info=not isinstance(error, NeapError),
            )

    def _read_events(self) -> bool:
        """Whether there are events since the last read."""
        if self._last_event is None:
            self._last_event = self._registry.last_event(self._model_id)
        seen = self._last_event
        for event in self._registry.events(self._model_id, after_event=seen, timeout_s=self._jittered(self._watch_s)):
            self._last_event = event.event
        return self._last_event != seen

    @staticmethod
    def _jittered(seconds: float) -> float:
        return seconds * random.uniform(0.5, 1.5)
