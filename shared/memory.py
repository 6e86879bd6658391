"""Gives memory that was freed back to the system, and spares collections that would find nothing."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# What was read lies free between matrices that were packed. It is given back after so many numbers.
TRIM_NUMBERS = 1 << 24
# As glibc's malloc.h numbers it, and how many heaps the threads of a service share.
_M_ARENA_MAX, _ARENAS = -8, 2


def share_heaps() -> None:
    """Has all threads share few heaps of the C library, to be called before there are any threads. By default each
    thread that loads or checks a model leaves a heap of its own, of which a few blocks are still in use: 25 to 55 MB in
    all. Does nothing without glibc."""
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is not None:
        limit(_M_ARENA_MAX, _ARENAS)


@contextmanager
def without_collection() -> Iterator[None]:
    """Collects no garbage within it, such as while modules are imported and vocabularies read: a million objects, of
    which little is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def release_free_memory() -> None:
    """Collects garbage, and calls `trim_heap`."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Returns free memory of the heap to the system. The C library keeps what was freed below a block in use.
    Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def trimmed(untrimmed: int) -> int:
    """The numbers that were read since the heap was last trimmed, once it is trimmed if they are many."""
    if untrimmed < TRIM_NUMBERS:
        return untrimmed
    trim_heap()
    return 0
