"""Files of a calibration's folder, written whole or not at all."""

from pathlib import Path

from shared import files
from shared.files import storage_error


def write_atomically(path: Path, data: bytes) -> None:
    """As `shared.files.write_atomically`, but creates the folder if it does not exist.

    Raises `Exhausted` (DISK_FULL) and `Unavailable` (STORAGE_UNAVAILABLE).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, data)
    except OSError as error:
        raise storage_error(error, path.name, place="the calibration's folder") from error
