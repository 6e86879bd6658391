"""Runs work in a thread that ends with it, so that its OpenMP thread pool ends, too.

PyTorch uses OpenMP on the CPU, and libgomp keeps one pool for every thread that has run a parallel region. If the pools
together have more threads than there are cores, libgomp stops spinning between regions, and a forward pass of hundreds
of short regions takes twice as long (docs/decisions/007). So loading, checks and calibration run in threads that end,
and only the engine's thread keeps a pool.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def run_in_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns `work(*args, **kwargs)`, run in a new thread, which has ended when this returns.
    Raises what `work` raises.

    An exception that interrupts the caller, for example Ctrl-C, is also raised in `work`, at its next line of Python. A
    thread that still ran inside PyTorch while the interpreter ends would abort the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(*args, **kwargs))
        except BaseException as error:  # any exception is raised again in the caller
            errors.append(error)

    name = getattr(work, "__name__", "work")  # a partial has none
    thread = threading.Thread(target=run, name=f"neap-{name}")
    try:
        thread.start()
        thread.join()
    except BaseException as error:
        if thread.ident is None:  # it had not begun
            raise
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(type(error)))
        thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
