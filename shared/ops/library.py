"""Finds and loads the compiled library, once per process, when an op is first needed."""

import threading
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import PreconditionFailed

LIBRARY = Path(__file__).resolve().parent / "_lib" / "libneap_ops.so"

_lock = threading.Lock()
_loaded = False


def is_available() -> bool:
    """Whether the library is built. Does not load it."""
    return _loaded or LIBRARY.exists()


def runs_on(device_type: str) -> bool:
    """Whether the library is built and has kernels for `device_type`, "cpu" or "cuda".
    Loads the library if it is built."""
    is_built = _loaded or LIBRARY.exists()
    return is_built and device_type in ("cpu", "cuda") and _has_kernels(device_type)


@cache
def _has_kernels(device_type: str) -> bool:
    """As `runs_on`, for a library that is built. Cached, because it is called several times per step."""
    load()
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key("neap::draft_top", device_type.upper())
    return has_kernel


def begin_call(*inputs: Tensor | None) -> None:
    """What each op does first. Raises as `load`, and `ValueError` if an input requires a gradient, because the result
    would silently have none."""
    if not _loaded:
        load()
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs):
        raise ValueError("neap's kernels have no gradient: call them under torch.no_grad()")


def load() -> None:
    """Registers the ops and their fakes with torch. Later calls cost one comparison.

    Raises `PreconditionFailed` if the library is not built or does not load. The ops have no slower fallback: a caller
    that can work without the library decides that itself.
    """
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        if not LIBRARY.exists():
            raise PreconditionFailed(
                f"neap's kernels are not built ({LIBRARY} is missing): run `make build-ops`", reason="OPS_NOT_BUILT"
            )
        try:
            torch.ops.load_library(str(LIBRARY))
        except OSError as error:
            raise PreconditionFailed(
                f"neap's kernels do not load, run `make build-ops`: {error}", reason="OPS_NOT_LOADABLE"
            ) from error
        from shared.ops import fakes, reference

        fakes.register()
        reference.register()
        _loaded = True
