"""Small immutable records in a folder: the store of a journal without a server."""

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.file_lock import file_lock
from shared.files import sync_folder
from shared.registry.blobs import registry_error

_NAME = re.compile(r"[0-9]{20}\.json")
_PART = ".part"


class FolderRecords:
    """A `shared.registry.journal.RecordStore` in a folder. Under one lock, a record is written to a temporary file, synced and renamed.

    Methods raise Exhausted (DISK_FULL), Unavailable.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, path: str, data: bytes) -> bool:
        """Create a record. Returns False if it already exists."""
        place = self._root / path
        with self._writing(place):
            if place.exists():
                return False
            self._write(place, data)
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Overwrite a damaged record."""
        place = self._root / path
        with self._writing(place):
            self._write(place, data)

    @contextmanager
    def _writing(self, place: Path) -> Iterator[None]:
        with _errors("a journal record"):
            self._make(place.parent)
            with file_lock(self._root / "journal.lock"):
                # Nobody else writes under the lock, so these files were left by a killed process.
                for part in place.parent.glob(f"*{_PART}"):
                    part.unlink()
                yield

    def _write(self, place: Path, data: bytes) -> None:
        part = place.with_name(f"{uuid.uuid4().hex}{_PART}")
        try:
            with part.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.rename(place)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        # The folder is not synced: if a power cut loses a record, the next process that opens the registry writes it again.

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            while folder != self._root:
                folder = folder.parent
                sync_folder(folder)

    def get(self, path: str) -> bytes | None:
        with _errors("reading a journal record"):
            try:
                return (self._root / path).read_bytes()
            except FileNotFoundError:
                return None

    def exists(self, path: str) -> bool:
        with _errors("reading the journal"):
            return (self._root / path).exists()

    def names(self, folder: str, *, after: str = "") -> list[str]:
        """List the records in `folder` in order, beginning after the name `after`."""
        with _errors("reading the journal"):
            try:
                found = [entry.name for entry in (self._root / folder).iterdir()]
            except FileNotFoundError:
                return []
        return sorted(name for name in found if _NAME.fullmatch(name) and name > after)

    def folders(self, folder: str) -> list[str]:
        """List the folders in `folder` in order."""
        with _errors("reading the journal"):
            try:
                return sorted(
                    entry.name for entry in (self._root / folder).iterdir() if entry.is_dir()
                )
            except FileNotFoundError:
                return []


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise registry_error(error, what) from error
