"""Writes files atomically and durably: a file is complete or absent, also after a crash."""

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
    """Replace the contents of `path` with `data`. A reader sees either all of the old contents or all of the new.

    The data is written to `part` and flushed to the device, `part` is renamed to `path`, and the folder is flushed. Once the
    function has returned, the file survives a crash of the machine. `part` must be a name that nobody else uses, on the same file
    system; None picks one beside `path`. The folders must exist. The file gets the mode of a new file, not that of the old file.

    `step` is called with "write", "written", "synced" and "renamed". `drop_cached` removes the file from the page cache, if the
    system supports it, so that the next read goes to the device.

    Raises `OSError`. After an error `part` is removed and `path` is unchanged, with one exception: if flushing the folder fails,
    `path` has the new contents and may lose them in a crash. A process that is killed leaves `part` behind.
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
    """Write a file and flush it to the device, without a rename. For folders that are renamed as a whole later. Raises `OSError`."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make files that were created or renamed in the folder `path` durable. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
