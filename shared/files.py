"""Files that are there whole or not at all, also after a crash."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path

# Called with the name of each step of a write, for fault injection in tests.
StepHook = Callable[[str], object]


def write_atomically(
    path: Path,
    data: bytes,
    *,
    part: Path | None = None,
    step: StepHook = lambda name: None,
    drop_cached: bool = False,
) -> None:
    """Puts `data` at `path`, in place of what is there. Whoever reads sees all of the old contents or all of the new.

    Written as `part`, flushed to the device, renamed, and then the folder is flushed: what has returned survives a crash of the
    machine. `part` is a name that nobody else uses, in a folder on the same file system; None: one beside `path`. The folders must
    exist. The file has the mode of any new file, whatever the mode of the one before.

    `step` is called with "write", "written", "synced" and "renamed". With `drop_cached`, whoever reads next asks the device and not
    the page cache, where the system can do that.

    Raises `OSError`. After an error `part` is gone and `path` is as it was; only where flushing the folder fails, `path` is new and
    may be lost in a crash. A process that is killed leaves `part` behind.
    """
    part = part or path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    with part.open("xb") as file:
        try:
            step("write")
            file.write(data)
            file.flush()
            step("written")
            os.fsync(file.fileno())
            if drop_cached and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            step("synced")
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    step("renamed")
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file of a folder that is renamed as a whole later: flushed to the device under its own name. Raises `OSError`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes what was created and renamed within `path` durable. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
