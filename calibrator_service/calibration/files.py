"""Files of a calibration's folder, written whole or not at all."""

import os
from pathlib import Path

from shared.storage import storage_error


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` under a temporary name, flushes it to disk and renames it. Until then an older file of that name stays.

    Raises `Exhausted` (DISK_FULL) and `Unavailable` (STORAGE_UNAVAILABLE).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, path.name, place="the calibration's folder") from error
