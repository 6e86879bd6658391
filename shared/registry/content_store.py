"""Blobs and manifests in a store, named by their digests.
They are read back when they are stored and checked when they are read."""

from functools import lru_cache

from shared.digests import digest_of
from shared.errors import Corrupt
from shared.files import StepHook
from shared.registry.contents import Kind, check_digest, check_size, content_damaged, content_path
from shared.registry.store import Store

_MAX_CACHED_MANIFESTS = 64


class ContentStore:
    """Thread-safe. `step` is called with the name of each step, for fault injection in tests."""

    def __init__(self, store: Store, *, step: StepHook = lambda name: None) -> None:
        self._store = store
        self._step = step
        self._remembered = lru_cache(_MAX_CACHED_MANIFESTS)(lambda digest: self.read("manifests", digest))

    def put(self, kind: Kind, data: bytes) -> str:
        """Store `data`, read it back and return its digest. A damaged object under this digest is replaced.
        Raises Corrupt."""
        digest = digest_of(data)
        path = content_path(kind, digest)
        if self._is_intact(kind, digest):
            self._store.sync(path)
            return digest
        self._step(f"write:{kind}")
        # Another publisher of the same bytes may be faster.
        if not self._store.create(path, data) and not self._is_intact(kind, digest):
            self._store.replace(path, data)
        self._step(f"written:{kind}")
        self.read(kind, digest)
        self._step(f"verified:{kind}")
        return digest

    def _is_intact(self, kind: Kind, digest: str) -> bool:
        try:
            self.read(kind, digest)
        except Corrupt:
            return False
        return True

    def read(self, kind: Kind, digest: str, size_bytes: int | None = None) -> bytes:
        """Read a content and check its digest. A content of another size than `size_bytes`, or a too large manifest, is
        not read.

        Raises Corrupt with metadata expected_digest and actual_digest ("" if it is missing or was not read).
        """
        path = content_path(kind, digest)
        try:
            data = self._store.get(path, lambda found_bytes: check_size(kind, digest, found_bytes, size_bytes))
        except Corrupt as error:
            if error.metadata:
                raise
            raise content_damaged(kind, digest, f"is damaged: {error.message}") from error
        if data is None:
            raise content_damaged(kind, digest, "is missing")
        return check_digest(kind, digest, data)

    def read_manifest(self, digest: str, *, is_fresh: bool = False) -> bytes:
        """Read a manifest and check its digest. Raises Corrupt.

        The last used manifests stay in memory, because every request needs one. `is_fresh` bypasses the memory.
        """
        return self.read("manifests", digest) if is_fresh else self._remembered(digest)

    def has(self, kind: Kind, digest: str) -> bool:
        return self._store.exists(content_path(kind, digest))
