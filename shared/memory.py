"""Gives memory that was freed back to the system."""

import ctypes
import gc


def release_free_memory() -> None:
    """Returns free memory of the heap to the system. The C library keeps what was freed below a block in use.
    Does nothing without glibc."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
