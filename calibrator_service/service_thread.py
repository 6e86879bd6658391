"""A thread of the service that does one thing after another, and goes on when a full disk or a locked job store is in
its way."""

import threading
from collections.abc import Callable

import structlog

from shared.errors import NeapError

# After the disk or the job store could not be used.
RETRY_INTERVAL_S = 5.0

log = structlog.get_logger("neap.calibration")


class ServiceThread:
    """Calls `step` again and again: after the seconds that it returns, and when woken. None: only when woken.

    `stopping`: a step should end. `has_died`: an unexpected exception has ended the thread. `is_held_up`: the last step
    raised NeapError or OSError. Call `start` and `stop` at most once each. Safe to use from several threads.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._name, self._step = name, step
        self._wake, self.stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._on_failure: Callable[[], object] = lambda: None
        self.has_died = self.is_held_up = False

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, on_failure: Callable[[], object]) -> None:
        """`on_failure` is called from the thread if an unexpected exception ends it."""
        self._on_failure = on_failure
        self._thread.start()

    def wake(self) -> None:
        """The next step is due now."""
        self._wake.set()

    def stop(self, timeout_s: float | None = None) -> None:
        """Waits for the step that runs."""
        self.stopping.set()
        self._wake.set()
        if self.is_alive:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self.stopping.is_set():
            self._wake.clear()
            if self.stopping.is_set():
                return  # its wake-up may be the one that was just cleared
            try:
                pause_s = self._step()
                self.is_held_up = False
            except (NeapError, OSError):
                log.exception("held up", thread=self._name)
                self.is_held_up, pause_s = True, RETRY_INTERVAL_S
            except Exception:
                if not self.stopping.is_set():  # else the store may have been closed
                    log.exception("a thread has died", thread=self._name)
                    self.has_died = True
                    self._on_failure()
                return
            self._wake.wait(pause_s)
