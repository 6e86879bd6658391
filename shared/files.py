"""Writes files atomically and durably: a file is complete or absent, also after a crash. Locks files between
processes, and says what an error of the operating system means for neap.

Every wait for a lock is bounded, because the holder may be suspended.
"""

import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import Exhausted, NeapError, Unavailable
from shared.timeouts import FILE_LOCK_S

# Called with the name of each step of a write, for fault injection in tests.
StepHook = Callable[[str], object]


def mark_used(path: Path) -> None:
    """Sets the file's times to now, by the exact clock: the system's own stamps are those of its last tick, so those of
    two files of a moment would be equal. Raises `OSError`."""
    now_ns = time.time_ns()
    os.utime(path, ns=(now_ns, now_ns))


def write_atomically(path: Path, data: bytes, *, step: StepHook = lambda name: None) -> None:
    """Replace the contents of `path` with `data`. A reader sees either all of the old contents or all of the new.

    The data is written to a file beside `path` and flushed to the device, this file is renamed to `path`, and the
    folder is flushed. Once the function has returned, the file survives a crash of the machine. The folder must exist.
    The file gets the mode of a new file, not that of the old file. `step` is called with "write", "written", "synced"
    and "renamed".

    Raises `OSError`. After an error `path` is unchanged and nothing is beside it, with one exception: if flushing the
    folder fails, `path` has the new contents and may lose them in a crash. A process that is killed leaves a file
    `*.part` behind.
    """
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    with part.open("xb") as file:
        try:
            step("write")
            file.write(data)
            file.flush()
            step("written")
            os.fsync(file.fileno())
            step("synced")
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    step("renamed")
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to the device, without a rename. For folders that are renamed as a whole later.
    Raises `OSError`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may enter, and close one that there is already to all others who are not of its
    group. For files that hold what clients have sent. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & stat.S_IRWXO:
        folder.chmod(mode & ~stat.S_IRWXO)


def sync_folder(path: Path) -> None:
    """Make files that were created or renamed in the folder `path` durable. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# EFBIG: a file size limit of the process or the file system.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}


def storage_error(error: OSError, what: str, *, place: str) -> NeapError:
    """Return `Exhausted` (DISK_FULL) or `Unavailable` (STORAGE_UNAVAILABLE).
    The text of `error` is only in the chained exception.

    For the message: `what` was to be stored or read, `place` is its folder.
    """
    name = errno.errorcode.get(error.errno or 0, "UNKNOWN")
    if error.errno in _FULL:
        return Exhausted(
            f"no space left in {place} for {what}; nothing was published", reason="DISK_FULL", metadata={"errno": name}
        )
    if error.errno in _REFUSED:
        return Unavailable(
            f"{place} cannot be used for {what} ({name}): it is read-only or belongs to another user",
            reason="STORAGE_UNAVAILABLE",
            metadata={"errno": name},
        )
    return Unavailable(
        f"{place} cannot be used for {what} ({name})", reason="STORAGE_UNAVAILABLE", metadata={"errno": name}
    )


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
