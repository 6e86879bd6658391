"""Engine threads and the end of the process.

A thread that runs PyTorch while the interpreter is finalised is ended inside C++, and the process aborts. So every
engine thread is stopped and joined before that: by an `atexit` callback, which runs once the main thread has ended,
however it ended, and once all threads that are not daemons have ended. Until then these may use their engines.

A fork waits until no engine is inside a step, because the child can hang if another thread of its parent runs PyTorch
during the fork. Any number of threads may fork at once. The child has the engines but not their threads. There they are
marked as ended, so that nothing waits for them.
"""

import atexit
import os
import threading
import weakref
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch.nn import Module

from shared.errors import PreconditionFailed, Unavailable


class ModelClaim:
    """The use of a model by one engine, from its construction until its thread has ended."""

    def __init__(self, model: Module) -> None:
        """Waits for an engine that is ending. Raises `PreconditionFailed` (reason MODEL_IN_USE) if the model's engine
        is not."""
        self._model = model
        self._released = threading.Event()
        # Set without a lock, by finalisers too.
        self.is_ending = False
        self.thread: int | None = None
        # Without a lock as well: a forked child would inherit it as it is then.
        while (held := _claims.setdefault(model, self)) is not self:
            if not held.is_ending or held.thread == threading.get_ident():
                raise PreconditionFailed("another engine uses this model; close it first", reason="MODEL_IN_USE")
            held._released.wait()

    def release(self) -> None:
        """Another engine may use the model from now on. Idempotent."""
        if _claims.get(self._model) is self:
            del _claims[self._model]
        self._released.set()


_claims: "WeakKeyDictionary[Any, ModelClaim]" = WeakKeyDictionary()


class Stoppable(Protocol):
    def request_stop(self) -> None:
        """Asks the thread to end after its current step. Takes no lock: finalisers call it, on any thread."""

    def join(self) -> None:
        """Returns once the thread has ended."""

    @property
    def gate(self) -> "ForkGate":
        """The thread works only behind it."""

    def forget(self) -> None:
        """In a forked child: there is no such thread."""


class ForkGate:
    """Lets one worker thread work, or any number of threads fork.
    Forks never wait for one another, so they cannot deadlock.

    The worker itself may fork, in a callback. While it waits for other engines, or forks, it counts as a thread that
    does not work.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_forks = 0
        self._worker: int | None = None

    @property
    def is_worker(self) -> bool:
        """Whether the calling thread works behind this gate now."""
        return self._worker == threading.get_ident()

    def __enter__(self) -> None:
        """The calling thread begins to work. Blocks while any thread forks."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_forks)
            self._worker = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._worker = None
            self._changed.notify_all()

    def let_fork(self) -> None:
        """The worker is between two pieces of its work: lets forks happen that wait for that."""
        if self._num_forks:
            self.__exit__()
            self.__enter__()

    def hold(self) -> None:
        """Before a fork: returns once the worker does not work. It stays so until `release`."""
        with self._changed:
            self._num_forks += 1
            if self.is_worker:
                self._worker = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._worker is None)

    def release(self) -> None:
        """In the parent, after a fork."""
        with self._changed:
            self._num_forks -= 1
            self._changed.notify_all()


_running: "weakref.WeakSet[Stoppable]" = weakref.WeakSet()
# Guards `_running`. Nobody waits for anything while holding it.
_listing = threading.Lock()
_is_exiting = False


def stop_at_exit(thread: Stoppable) -> None:
    """Call it before the thread starts. Raises `Unavailable` once the interpreter is ending."""
    if _is_exiting:
        raise Unavailable("the interpreter is shutting down", reason="SHUTTING_DOWN")
    with _listing:
        _running.add(thread)


def _listed() -> list[Stoppable]:
    with _listing:
        return list(_running)


@atexit.register
def _stop_all() -> None:
    global _is_exiting
    _is_exiting = True
    threads = _listed()
    for thread in threads:
        thread.request_stop()
    for thread in threads:
        thread.join()


class _Fork(threading.local):
    """What the fork of this thread holds, and whether it interrupts that engine's own thread."""

    def __init__(self) -> None:
        self.held: list[tuple[ForkGate, bool]] = []


_fork = _Fork()


def _hold_all() -> None:
    held = {id(gate) for gate, _ in _fork.held}
    # Again, for engines that were made meanwhile.
    while gates := [thread.gate for thread in _listed() if id(thread.gate) not in held]:
        # That of this thread first: the thread of another engine may fork, too, and wait for it.
        for gate in sorted(gates, key=lambda gate: not gate.is_worker):
            held.add(id(gate))
            _fork.held.append((gate, gate.is_worker))
            gate.hold()


def _release_all() -> None:
    held, _fork.held = _fork.held, []
    for gate, _ in held:
        gate.release()
    for gate, was_worker in held:
        if was_worker:
            gate.__enter__()


def _forget_all() -> None:
    global _running, _listing
    _fork.held = []
    # Another thread of the parent may have held the lock.
    _listing = threading.Lock()
    threads = list(_running)
    _running = weakref.WeakSet()
    for thread in threads:
        thread.forget()


os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_forget_all)
