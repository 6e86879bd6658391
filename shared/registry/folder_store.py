"""A `Store` in a folder, which several processes of one machine may use at once. Needs a file system with hard links.

A file is written under a temporary name in `parts`, synced, and then linked to its own name. The link fails if the name
exists, so one of several writers creates an object, and a reader never sees a part of one. Then every folder on the
path is synced.
"""

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from shared.errors import Corrupt, PreconditionFailed
from shared.files import StepHook, storage_error, sync_folder
from shared.registry.store import PRIVATE, StoredObject

_PARTS = "parts"
# Errors that concern one file, in contrast to errors of the process or of the whole file system.
_DAMAGED = {errno.EIO, errno.EISDIR, errno.ELOOP}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK}


class FolderStore:
    """The objects in the folder `root`, which is created if it does not exist. Readers need no right to write.

    `step` is called with the name of each step of a write, for fault injection in tests.
    """

    max_parallel_reads = 1

    def __init__(self, root: Path, *, step: StepHook = lambda name: None) -> None:
        self.root = root.absolute()
        self._step = step
        # Folders whose names survive a power cut.
        self._durable: set[Path] = set()
        with _errors(str(root)):
            missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                self._sync_name(folder)

    def create(self, path: str, data: bytes) -> bool:
        place = self.root / path
        with _errors(path), self._part(path, data) as part:
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(part, place)
                is_new = True
            except FileExistsError:
                is_new = False
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise _no_links_error(self.root) from error
                raise
            self._step(f"linked:{path.partition('/')[0]}")
            self._sync_folders(place)
        return is_new

    def replace(self, path: str, data: bytes) -> None:
        place = self.root / path
        with _errors(path), self._part(path, data) as part:
            place.parent.mkdir(parents=True, exist_ok=True)
            part.replace(place)
            self._sync_folders(place)

    @contextmanager
    def _part(self, path: str, data: bytes) -> Iterator[Path]:
        """A synced file with `data`, which exists within the block."""
        kind = path.partition("/")[0]
        part = self.root / _PARTS / uuid.uuid4().hex
        part.parent.mkdir(exist_ok=True)
        try:
            mode = 0o660 if kind in PRIVATE else 0o666
            with open(part, "xb", opener=partial(os.open, mode=mode)) as file:
                file.write(data)
                file.flush()
                self._step(f"part:{kind}")
                os.fsync(file.fileno())
                # Dropped from the page cache, so that reading back reads from the device.
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._step(f"synced:{kind}")
            yield part
        finally:
            part.unlink(missing_ok=True)

    def sync(self, path: str) -> None:
        with _errors(path):
            self._sync_folders(self.root / path)

    def _sync_folders(self, place: Path) -> None:
        folder = place.parent
        sync_folder(folder)
        # Another process may have made a folder and not have synced its name yet. Once is enough, because folders stay.
        named: list[Path] = []
        while folder not in self._durable and folder != self.root.parent:
            self._sync_name(folder)
            named.append(folder)
            folder = folder.parent
        self._durable.update(named)

    def _sync_name(self, folder: Path) -> None:
        try:
            sync_folder(folder.parent)
        except PermissionError:
            # The folder above the registry may belong to somebody else, who has then made this one.
            if self.root.is_relative_to(folder):
                return
            raise

    def get(self, path: str, check_size: Callable[[int], None] = lambda size_bytes: None) -> bytes | None:
        with _errors(path, reads=True):
            try:
                with (self.root / path).open("rb") as file:
                    check_size(os.fstat(file.fileno()).st_size)
                    return file.read()
            except FileNotFoundError:
                return None

    def exists(self, path: str) -> bool:
        with _errors(path):
            return (self.root / path).exists()

    def remove(self, path: str) -> None:
        with _errors(path):
            (self.root / path).unlink(missing_ok=True)

    def last_modified_s(self, path: str) -> float:
        with _errors(path):
            return (self.root / path).stat().st_mtime

    def names(self, folder: str, *, after: str = "") -> list[str]:
        return sorted(entry.name for entry in self._entries(folder) if entry.name > after)

    def folders(self, folder: str) -> list[str]:
        return sorted(entry.name for entry in self._entries(folder) if entry.is_dir())

    def objects(self, folder: str) -> Iterator[StoredObject]:
        for entry in self._entries(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from self.objects(f"{folder}/{entry.name}")
            else:
                with _errors(folder):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed since it was listed
                        continue
                yield StoredObject(f"{folder}/{entry.name}", status.st_size, status.st_mtime)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        with _errors(folder):
            try:
                with os.scandir(self.root / folder) as entries:
                    return list(entries)
            except FileNotFoundError:
                return []


@contextmanager
def _errors(path: str, *, reads: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if reads and error.errno in _DAMAGED:
            raise Corrupt(f"{path} cannot be read ({errno.errorcode[error.errno]})") from error
        raise storage_error(error, path, place="the registry's folder") from error


def _no_links_error(root: Path) -> PreconditionFailed:
    return PreconditionFailed(
        f"the file system of {root} has no hard links, which a registry in a folder needs",
        reason="NO_CONDITIONAL_WRITES",
    )
