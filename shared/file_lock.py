"""Advisory file locks between processes. Every wait for one is bounded, because the holder may be suspended."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import NeapError, Unavailable
from shared.timeouts import FILE_LOCK_S

_POLL_S = 0.02


@contextmanager
def file_lock(
    path: Path, *, shared: bool = False, timeout_s: float | None = None, locked: NeapError | None = None
) -> Iterator[None]:
    """Hold a lock on the file `path`, which is created if it does not exist.

    Waits for the lock for at most `timeout_s` seconds. None means FILE_LOCK_S, 0 means not to wait. Raises `locked`, by
    default Unavailable (LOCKED), if another process holds the lock for longer, and OSError.
    """
    timeout_s = FILE_LOCK_S if timeout_s is None else timeout_s
    give_up_at = time.monotonic() + timeout_s
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= give_up_at:
                    raise locked or Unavailable(
                        f"another process has held {path.name} for {timeout_s:g} s", reason="LOCKED"
                    ) from error
            time.sleep(_POLL_S)
        yield
