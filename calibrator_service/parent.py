"""Ends a job's process when the service that started it ends, even if the service is killed with SIGKILL."""

import ctypes
import os
import signal
import sys
import threading
from typing import IO

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, pipe: IO[str]) -> None:
    """Kills this process's group when the parent ends. A thread reads `pipe`, which is closed when the parent ends in whatever way.

    On Linux the kernel also sends SIGKILL, which reaches a process that is stuck while it holds the interpreter's lock.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If the parent died before the call, no signal comes.
        if os.getppid() != parent_pid:
            os._exit(1)
    threading.Thread(target=_watch, args=(pipe,), name="parent-watch", daemon=True).start()


def _watch(pipe: IO[str]) -> None:
    while pipe.read(1):
        pass
    os.killpg(0, signal.SIGKILL)
