"""What a job's process has of its service: a pipe, through which it tells how it gets on, and the end that both have
together."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from calibrator_service.calibration.progress import Progress
from calibrator_service.job import Report

SIGN_OF_LIFE_INTERVAL_S = 5.0
# Progress within a phase is told at most once in this time.
PROGRESS_INTERVAL_S = 0.2
_PR_SET_PDEATHSIG = 1


class ServiceLink:
    """Safe to use from several threads. `stop`: the service wants the job to end.

    Kills this process's group when the service ends, even by SIGKILL: then the pipe is closed, which a thread notices.
    On Linux the kernel also sends SIGKILL, which reaches a process that is stuck while it holds the interpreter's lock.
    """

    def __init__(self, pipe: Connection, parent_pid: int) -> None:
        self._pipe, self._lock = pipe, threading.Lock()
        self.stop = threading.Event()
        self._phase, self._told_at_s = "", 0.0
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # If the parent died before the call, no signal comes.
            if os.getppid() != parent_pid:
                os._exit(1)
        threading.Thread(target=self._listen, name="service-link", daemon=True).start()

    def progress(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.phase != self._phase or now_s - self._told_at_s >= PROGRESS_INTERVAL_S:
            self._phase, self._told_at_s = progress.phase, now_s
            self.tell(progress)

    def tell(self, report: Report) -> None:
        """Never fails the job. Without its service this process is killed anyway."""
        with self._lock, suppress(OSError):
            self._pipe.send(report)

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self.tell("")
                if self._pipe.poll(SIGN_OF_LIFE_INTERVAL_S):
                    self._pipe.recv()
                    self.stop.set()
        os.killpg(0, signal.SIGKILL)
