"""Lets a program that SIGTERM ends remove what it has put on disk for a while."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Within it SIGTERM raises `SystemExit` in the main thread, so that `finally` blocks run; the exit status is 143,
    as shells say it.

    Does nothing outside of the main thread, and where the program handles SIGTERM itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
