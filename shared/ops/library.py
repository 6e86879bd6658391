"""Finding and loading the compiled library, once per process and only when an op is first wanted."""

import threading
from functools import cache
from pathlib import Path

import torch

from shared.errors import PreconditionFailed

LIBRARY = Path(__file__).resolve().parent / "_lib" / "libneap_ops.so"

_lock = threading.Lock()
_loaded = False


def is_available() -> bool:
    """Whether the library is built. Does not load it."""
    return _loaded or LIBRARY.exists()


def runs_on(device_type: str) -> bool:
    """Whether the library is built, and for "cpu" or "cuda". Loads it if it is."""
    if not is_available() or device_type not in ("cpu", "cuda"):
        return False
    load()
    return _has_kernels(device_type)


@cache
def _has_kernels(device_type: str) -> bool:
    """Of the library once it is loaded: asked several times a step."""
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        "neap::exit_head", device_type.upper()
    )
    return has_kernel


def load() -> None:
    """Registers the ops and their fakes with torch. Costs one comparison once done.

    Raises `PreconditionFailed` if the library is not built or does not load. There is no slower stand-in: what runs
    without the library must say so itself.
    """
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        if not LIBRARY.exists():
            raise PreconditionFailed(
                f"neap's kernels are not built ({LIBRARY} is missing): run `make build-ops`",
                reason="OPS_NOT_BUILT",
            )
        try:
            torch.ops.load_library(str(LIBRARY))
        except OSError as error:
            raise PreconditionFailed(
                f"neap's kernels do not load, run `make build-ops`: {error}",
                reason="OPS_NOT_LOADABLE",
            ) from error
        from shared.ops import fakes

        fakes.register()
        _loaded = True
