"""What synchronous calls do otherwise than those for asyncio of `aio_calls`, which has the same names.

A call that brings nothing for too long is cancelled from outside: one thread sees to those of all clients.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable
from time import sleep as sleep
from typing import Any, TypeVar

import grpc

from neap_client.channel import open_channel as open_channel
from neap_client.status import from_rpc_error

CHECK_S = 0.5

T = TypeVar("T")


def called(call: Callable[[], T]) -> T:
    """Make a call. Raises NeapError as the service raised it."""
    try:
        return call()
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def read(call: Any) -> Any:
    """Return the next message of a stream, None at its end. Raises NeapError as the service raised it."""
    return called(lambda: next(call, None))


class EventReader:
    """Reads the events of one stream's calls, and waits between them. `close`, by any thread, ends a wait."""

    def __init__(self) -> None:
        self._closing = threading.Event()
        self._call: Any = None
        # When the event that is awaited is overdue, by `time.monotonic`.
        self._due_s = math.inf
        self._is_stalled = self._is_watched = False

    def close(self) -> None:
        self._closing.set()
        with _lock:
            _watched.discard(self)

    def read(self, call: Any, timeout_s: float) -> Any:
        """Return the next event, None at the end.
        Raises NeapError as the service raised it, TimeoutError if it takes longer than `timeout_s`."""
        if timeout_s < math.inf:
            self._call, self._due_s = call, time.monotonic() + timeout_s
            if not self._is_watched:
                self._is_watched = True
                _watch(self)
        try:
            event = next(call, None)
        except grpc.RpcError as error:
            if self._is_stalled:
                self._is_stalled = False
                raise TimeoutError from error
            raise from_rpc_error(error) from error
        finally:
            self._due_s = math.inf
        if event is None:
            with _lock:
                _watched.discard(self)
        return event

    def wait(self, seconds: float) -> None:
        """Wait until `close` is called, for at most `seconds`."""
        self._closing.wait(seconds)

    def cancel_if_stalled(self) -> None:
        if time.monotonic() > self._due_s:
            self._is_stalled = True
            self._call.cancel()


_lock = threading.Lock()
_watched: weakref.WeakSet[EventReader] = weakref.WeakSet()
_thread: threading.Thread | None = None


def _watch(reader: EventReader) -> None:
    global _thread
    with _lock:
        _watched.add(reader)
        if _thread is None or not _thread.is_alive():  # a forked child has no thread
            _thread = threading.Thread(target=_check, name="neap-stalls", daemon=True)
            _thread.start()


def _check() -> None:
    global _thread
    while True:
        time.sleep(CHECK_S)
        with _lock:
            readers = list(_watched)
            if not readers:
                _thread = None
                return
        for reader in readers:
            reader.cancel_if_stalled()
        del readers  # or the last ones would live on
