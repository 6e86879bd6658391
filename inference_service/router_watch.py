"""Notices published routers and moved aliases, so that ladders are prepared before a request needs them."""

import random
import threading
import time
from collections.abc import Callable

import structlog

from shared.errors import NeapError
from shared.registry.base import Registry

# How long one read of the event stream waits. After an answer the next read follows at once, after an error it follows a pause.
WATCH_S = 1.0
PAUSE_S = 2.0
# Interval of the polls that complement the stream. Times 0.5 to 1.5, so that workers started together do not poll together.
POLL_S = 30.0

log = structlog.get_logger("neap.routers")


class RouterWatch:
    """A thread that follows one model's events, starting after the newest one. It calls `on_change` after new events and every `poll_s`,
    measured in seconds by `clock`.

    After an outage of the registry it continues after the last event that it has read, so that it misses none. Requests do not
    depend on it, because they resolve their alias themselves.
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
    ) -> None:
        self._registry = registry
        self._model_id = model_id
        self._on_change = on_change
        self._watch_s, self._pause_s, self._poll_s = watch_s, pause_s, poll_s
        self._clock = clock
        self._last_event: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neap-router-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current read of the stream. Does not wait for it, because the registry may hang."""
        self._stopping.set()

    def _run(self) -> None:
        is_away = False
        poll_at_s = self._clock() + self._jittered(self._poll_s)
        while not self._stopping.is_set():
            try:
                has_changed = self._read_events()
                if is_away:
                    log.info("routers are watched again", model_id=self._model_id)
                is_away = False
            except NeapError as error:
                has_changed = False
                if not is_away and not self._stopping.is_set():
                    log.warning(
                        "routers cannot be watched", model_id=self._model_id, reason=error.reason
                    )
                is_away = True
                self._stopping.wait(self._jittered(self._pause_s))
            if has_changed or self._clock() >= poll_at_s:
                self._on_change()
                poll_at_s = self._clock() + self._jittered(self._poll_s)

    def _read_events(self) -> bool:
        """Whether there are events since the last read."""
        if self._last_event is None:
            self._last_event = self._registry.last_event(self._model_id)
        seen = self._last_event
        for event in self._registry.events(
            self._model_id, after_event=seen, timeout_s=self._jittered(self._watch_s)
        ):
            self._last_event = event.event
        return self._last_event != seen

    @staticmethod
    def _jittered(seconds: float) -> float:
        return seconds * random.uniform(0.5, 1.5)
