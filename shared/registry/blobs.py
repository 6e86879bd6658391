"""A content-addressed folder with `blobs/sha256/ab/<hex>` and `manifests/sha256/ab/<hex>`. Objects are written atomically.

An object is written to a temporary file, synced and renamed, its folder is synced, and the object is read back. A working publisher
holds a shared lock and keeps a folder `staging/<id>` with a marker for each object it created. From the markers, a process with the
exclusive lock finds and removes the objects of failed or killed publishers. While it holds the lock nobody publishes, so nobody
relies on an object that no index entry names.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shared.errors import NeapError, Unavailable
from shared.file_lock import file_lock
from shared.files import sync_folder, write_atomically
from shared.registry.canonical import DIGEST_PATTERN, digest_of
from shared.registry.contents import (
    Kind,
    check_digest,
    check_size,
    content_damaged,
    content_path,
)
from shared.storage import storage_error

# Errors that concern one file, in contrast to errors of the process or of the whole file system.
_DAMAGED = {errno.EIO, errno.EISDIR, errno.ELOOP}

StepHook = Callable[[str], None]


def registry_error(error: OSError, what: str) -> NeapError:
    """Map an operating system error on the registry's folder to a NeapError."""
    return storage_error(error, what, place="the registry's folder")


class ContentStore:
    """`step` is called with the name of each step of a write, for fault injection in tests."""

    def __init__(self, root: Path, *, step: StepHook) -> None:
        self.root = root
        self._step = step
        self._staging = root / "staging"
        self._publish_lock = root / "publish.lock"

    def path(self, kind: Kind, digest: str) -> Path:
        """Return the path of an object. Raises Corrupt if `digest` is malformed."""
        return self.root / content_path(kind, digest)

    def read(self, kind: Kind, digest: str, size_bytes: int | None = None) -> bytes:
        """Read an object and check its digest. An object of another size than `size_bytes`, or a too large manifest, is not read.

        Raises Corrupt with metadata expected_digest and actual_digest ("" if it is missing or was not read).
        """
        path = self.path(kind, digest)
        try:
            check_size(kind, digest, path.stat().st_size, size_bytes)
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise content_damaged(kind, digest, "is missing") from error
        except OSError as error:
            if error.errno in _DAMAGED:
                what = f"cannot be read ({errno.errorcode[error.errno]})"
                raise content_damaged(kind, digest, what) from error
            raise registry_error(error, "a read") from error
        return check_digest(kind, digest, data)

    @contextmanager
    def publishing(self) -> Iterator["Staging"]:
        """A block in which objects may be added. The index entry that names them must be added in the same block."""
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self._publish_lock, shared=True))
            except OSError as error:
                raise registry_error(error, "a lock") from error
            folder = self._staging / f"{os.getpid()}-{uuid.uuid4().hex}"
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise registry_error(error, "a staging folder") from error
            try:
                yield Staging(self, folder, self._step)
            except BaseException:
                for part in folder.glob("*.part"):
                    part.unlink(missing_ok=True)
                raise
            # Only after success, because `sweep` needs the markers of a failed publication.
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, is_referenced: Callable[[Kind, str], bool]) -> int:
        """Remove the objects of failed or killed publishers. Does nothing while another process publishes. Returns their number."""
        if not self._staging.is_dir() or not any(self._staging.iterdir()):
            return 0
        num_removed = 0
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self._publish_lock, timeout_s=0))
            except OSError as error:
                raise registry_error(error, "a lock") from error
            except Unavailable:
                return 0  # another process publishes
            for folder in self._staging.iterdir():
                for marker in folder.iterdir():
                    kind, _, hexadecimal = marker.name.removesuffix(".part").partition("-")
                    digest = f"sha256:{hexadecimal}"
                    if kind not in ("blobs", "manifests") or not DIGEST_PATTERN.fullmatch(digest):
                        continue
                    kind_name: Kind = "blobs" if kind == "blobs" else "manifests"
                    path = self.path(kind_name, digest)
                    if path.exists() and not is_referenced(kind_name, digest):
                        path.unlink()
                        num_removed += 1
                shutil.rmtree(folder, ignore_errors=True)
        return num_removed


class Staging:
    """The objects that one publisher is adding."""

    def __init__(self, store: ContentStore, folder: Path, step: StepHook) -> None:
        self._store = store
        self._folder = folder
        self._step = step

    def put(self, kind: Kind, data: bytes) -> str:
        """Store `data` and read it back. Returns its digest. Raises Exhausted (DISK_FULL), Corrupt, Unavailable."""
        digest = digest_of(data)
        path = self._store.path(kind, digest)
        try:
            if path.exists() and digest_of(path.read_bytes()) == digest:
                return digest
            # An existing object that does not match its digest is replaced.
            self._write(kind, data, path)
        except OSError as error:
            raise registry_error(error, f"the {kind[:-1]} {digest[:19]}") from error
        self._store.read(kind, digest)
        self._step(f"verified:{kind}")
        return digest

    def _write(self, kind: Kind, data: bytes, path: Path) -> None:
        marker = self._folder / f"{kind}-{path.name}"
        part = marker.with_name(marker.name + ".part")
        if not path.exists():
            marker.touch()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Dropped from the page cache so that reading back reads from the device.
        write_atomically(
            path, data, part=part, step=lambda name: self._step(f"{name}:{kind}"), drop_cached=True
        )
        for folder in (path.parent.parent, path.parent.parent.parent):
            sync_folder(folder)
