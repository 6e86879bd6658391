"""Ends a job's process when the service that started it ends, even if the service is killed with SIGKILL."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1


def live_with_parent(parent_pid: int, pipe: Connection, on_word: Callable[[], object]) -> None:
    """Kills this process's group when the parent ends. A thread calls `on_word` for what the parent says through `pipe`, which is closed
    when the parent ends in whatever way.

    On Linux the kernel also sends SIGKILL, which reaches a process that is stuck while it holds the interpreter's lock.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If the parent died before the call, no signal comes.
        if os.getppid() != parent_pid:
            os._exit(1)

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                pipe.recv()
                on_word()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, name="parent-watch", daemon=True).start()
