"""Gives memory that was freed back to the system."""

import ctypes
import gc


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
