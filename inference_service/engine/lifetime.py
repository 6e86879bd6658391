"""Engine threads and the end of the process.

A thread that runs PyTorch while the interpreter is finalised is ended inside C++, and the process aborts. So every engine thread is
stopped and joined before that: by an `atexit` callback, which runs once the main thread has ended, however it ended, and once all
threads that are not daemons have ended. Until then these may use their engines.

A fork waits until no engine is inside a step: the child of a process whose other threads run PyTorch can hang. The child has the
engines but not their threads; there they are marked as ended, so that nobody waits for them.
"""

import atexit
import os
import weakref
from typing import Protocol

from shared.errors import Unavailable


class Stoppable(Protocol):
    def request_stop(self) -> None:
        """Asks the thread to end after its current step. Takes no lock: finalisers call it, on any thread."""

    def join(self) -> None:
        """Returns once the thread has ended."""

    def hold(self) -> None:
        """Before a fork: returns once the thread is between two steps, where it stays until `release`."""

    def release(self) -> None:
        """In the parent, after a fork."""

    def forget(self) -> None:
        """In a forked child: there is no such thread."""


_running: "weakref.WeakSet[Stoppable]" = weakref.WeakSet()
_is_exiting = False


def stop_at_exit(thread: Stoppable) -> None:
    """Call it before the thread starts. Raises `Unavailable` once the interpreter is ending."""
    if _is_exiting:
        raise Unavailable("the interpreter is shutting down", reason="SHUTTING_DOWN")
    _running.add(thread)


@atexit.register
def _stop_all() -> None:
    global _is_exiting
    _is_exiting = True
    threads = list(_running)
    for thread in threads:
        thread.request_stop()
    for thread in threads:
        thread.join()


_held: list[Stoppable] = []


def _hold_all() -> None:
    _held[:] = _running
    for thread in _held:
        thread.hold()


def _release_all() -> None:
    for thread in _held:
        thread.release()
    _held.clear()


def _forget_all() -> None:
    for thread in _held:
        thread.forget()
    _held.clear()
    _running.clear()


os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_forget_all)
