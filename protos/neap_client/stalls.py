"""Cancels calls that bring nothing for too long. One thread sees to those of all synchronous clients."""

import threading
import time
import weakref
from typing import Protocol

CHECK_S = 0.5


class Watched(Protocol):
    def cancel_if_stalled(self, now_s: float) -> None:
        """Cancel the call if its next event is overdue. `now_s` by `time.monotonic`."""


_lock = threading.Lock()
_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_thread: threading.Thread | None = None


def watch(stream: Watched) -> None:
    """Check `stream` every CHECK_S, until `forget`. Idempotent."""
    global _thread
    with _lock:
        _watched.add(stream)
        if _thread is None or not _thread.is_alive():  # a forked child has no thread
            _thread = threading.Thread(target=_check, name="neap-stalls", daemon=True)
            _thread.start()


def forget(stream: Watched) -> None:
    with _lock:
        _watched.discard(stream)


def _check() -> None:
    global _thread
    while True:
        time.sleep(CHECK_S)
        with _lock:
            streams = list(_watched)
            if not streams:
                _thread = None
                return
        now_s = time.monotonic()
        for stream in streams:
            stream.cancel_if_stalled(now_s)
        del streams  # or the last ones would live on
