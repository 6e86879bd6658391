"""Work whose thread pool must not outlive it.

PyTorch's CPU parallelism is OpenMP, and libgomp keeps one pool per thread that ever ran a parallel region. Once the pools
together hold more threads than there are cores, libgomp stops spinning between regions, and a forward pass of hundreds of short
regions takes twice as long (docs/decisions/004). So whatever loads, probes or calibrates does it in a thread that ends, and the
engine's thread is left with the only pool.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_own_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(*args, **kwargs)` in a thread of its own, which has ended on return. Raises what it raises.

    What interrupts the caller, Ctrl-C say, is raised in the work, too, at its next line of Python. A thread that ran on inside
    PyTorch while the interpreter ends would abort the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(*args, **kwargs))
        except BaseException as error:  # handed to the caller, whatever it is
            errors.append(error)

    name = getattr(work, "__name__", "work")  # a partial has none
    thread = threading.Thread(target=run, name=f"neap-{name}")
    try:
        thread.start()
        thread.join()
    except BaseException as error:
        if thread.ident is None:  # it had not begun
            raise
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(type(error))
        )
        thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]
