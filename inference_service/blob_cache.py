"""A bounded cache of a shared registry's blobs on the worker's disk.
Blobs are fetched once per machine and checked at every read."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from shared.digests import digest_of
from shared.files import mark_used, write_atomically
from shared.registry.base import PublishedVersion
from shared.registry.contents import blob_digest, blob_size_bytes, hexadecimal_of

log = structlog.get_logger("neap.registry")

Fetch = Callable[[PublishedVersion, str], bytes]


class BlobCache:
    """`read_blob` with a cache of files in `folder`.
    Above `max_bytes` in total, the least recently read files are removed.

    Several processes may use one folder. If the disk is full or broken, the error is logged and the fetched blob is
    used without being cached.
    """

    def __init__(self, folder: Path, fetch: Fetch, *, max_bytes: int) -> None:
        self._folder = folder
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def read_blob(self, version: PublishedVersion, name: str) -> bytes:
        """See `Registry.read_blob`. Raises the errors of `fetch`."""
        digest = blob_digest(version.manifest, name, version.model_id, version.version)
        path = self._folder / hexadecimal_of(digest)
        data = self._read(path, digest, blob_size_bytes(version.manifest, name))
        if data is not None:
            return data
        data = self._fetch(version, name)
        try:
            self._write(path, data)
        except OSError as error:
            log.warning("a router was not kept on disk", digest=digest, errno=error.errno)
        return data

    def _read(self, path: Path, digest: str, size_bytes: int) -> bytes | None:
        try:
            # The size is checked before reading, because a damaged file may have any size.
            data = path.read_bytes() if path.stat().st_size == size_bytes else b""
            if digest_of(data) == digest:
                mark_used(path)
                return data
            log.warning("a router on disk was damaged; it is fetched anew", digest=digest)
            path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("a router on disk cannot be read", digest=digest, errno=error.errno)
        return None

    def _write(self, path: Path, data: bytes) -> None:
        if len(data) > self._max_bytes:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._make_room(len(data))
            write_atomically(path, data)
            mark_used(path)

    def _make_room(self, num_bytes: int) -> None:
        entries = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # removed by another process
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total + num_bytes <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
