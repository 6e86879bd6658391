"""Writes files atomically and durably: a file is complete or absent, also after a crash."""

import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

# Called with the name of each step of a write, for fault injection in tests.
StepHook = Callable[[str], object]


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
