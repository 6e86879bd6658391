"""Waits that Ctrl-C may interrupt while a gRPC call runs.

Python raises KeyboardInterrupt between any two instructions of the main thread. Inside gRPC's own code it can leave a
call that was begun and that nobody serves; closing the channel then waits for that call for ever. So another thread
makes the call, and the main thread only waits for its results.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def interruptible(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`, which another thread reads. Raises what reading them raises.

    If Ctrl-C ends the iteration, the thread goes on until `items` ends.
    Closing the client ends a stream of its replies.
    """
    results: SimpleQueue[Future[T] | None] = SimpleQueue()

    def read() -> None:
        try:
            for item in items:
                result = Future[T]()
                result.set_result(item)
                results.put(result)
            results.put(None)
        except BaseException as error:  # any exception is raised again in the caller
            result = Future[T]()
            result.set_exception(error)
            results.put(result)

    threading.Thread(target=read, name="neap-read", daemon=True).start()
    while (result := results.get()) is not None:
        yield result.result()


def interruptible_call(call: Callable[[], T]) -> T:
    """Return `call()`, which another thread runs. Raises what it raises."""

    def only_result() -> Iterator[T]:
        yield call()

    [result] = interruptible(only_result())
    return result
