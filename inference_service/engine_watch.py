"""Ends a worker whose engine hangs, so that it is restarted.

A kernel that never returns raises nothing: streams stay open, and health checks go on passing. A device that has hung
cannot be left by the thread that waits for it, so only the end of the process helps.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

import structlog

from shared.engine.engine import Engine

# Looks per time limit.
NUM_LOOKS = 10
EXIT_STATUS = 1

log = structlog.get_logger("neap.worker")


def exit_at_once() -> None:
    """Ends the process without waiting for its threads, one of which hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


class EngineWatch:
    """Looks at engines from a thread of its own. `engines` may grow meanwhile.

    Calls `on_hang` once an engine has been in the same turn of its loop for `limit_s` seconds. A look counts for the
    time between two looks only, so a process that was suspended, or starved with the engine, is given its time.
    """

    def __init__(
        self, engines: Sequence[Engine], limit_s: float, *, on_hang: Callable[[], object] = exit_at_once
    ) -> None:
        self._engines, self._limit_s, self._on_hang = engines, limit_s, on_hang
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neap-engine-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        seen: dict[int, tuple[float, int]] = {}  # engine -> when its turn began, looks since then
        while not self._stopping.wait(self._limit_s / NUM_LOOKS):
            for number, engine in enumerate(tuple(self._engines)):
                began_s = engine.turn_began_s
                if began_s is None:
                    seen.pop(number, None)
                    continue
                before_s, looks = seen.get(number, (None, 0))
                looks = looks + 1 if before_s == began_s else 0
                seen[number] = began_s, looks
                if looks == NUM_LOOKS:
                    self._report(engine)
                    self._on_hang()

    def _report(self, engine: Engine) -> None:
        frame = sys._current_frames().get(engine.thread_id or 0)
        log.critical(
            "the engine hangs; the worker ends",
            model_id=engine.loaded.model_id,
            seconds=self._limit_s,
            stack="".join(traceback.format_stack(frame)) if frame is not None else None,
        )
