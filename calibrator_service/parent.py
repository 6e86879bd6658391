"""A job's process never outlives the service that started it, even if that is killed with SIGKILL."""

import ctypes
import os
import signal
import sys
import threading
from typing import IO

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, pipe: IO[str]) -> None:
    """Die when the parent does. `pipe` is read from now on: it ends when the parent has ended, however it did.

    On Linux the kernel sends SIGKILL as well, which also reaches a process that is stuck holding the interpreter's lock.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the call: then no signal comes.
        if os.getppid() != parent_pid:
            os._exit(1)
    threading.Thread(target=_watch, args=(pipe,), name="parent-watch", daemon=True).start()


def _watch(pipe: IO[str]) -> None:
    while pipe.read(1):
        pass
    os.killpg(0, signal.SIGKILL)
