"""The interface of the stores: a folder or a bucket of objects under paths with '/', the same paths in both.

neap-registry.json                      id and schema of the registry
blobs/sha256/ab/<hex>                   content, named by its digest
manifests/sha256/ab/<hex>
models/<model id, '/' as '!'>/journal/<20 digits>.json     see journal.py
requests/<sha256 of a request id>.json  the model to which a request id belongs
probes/<random>                         empty; exists for a moment, see `Registry.check_writable`
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from shared.errors import PreconditionFailed
from shared.registry.sealed import open_sealed, seal

SCHEMA_VERSION = 1
_MARKER = "neap-registry.json"


@dataclass(frozen=True)
class StoredObject:
    """`last_modified_s`: Unix seconds by the store's clock."""

    name: str
    size_bytes: int
    last_modified_s: float


class SweepWatch(Protocol):
    """Tells one publisher whether a sweep is running."""

    # How long after `is_held` returned False no sweep removes an unnamed object.
    safe_s: float

    def is_held(self) -> bool: ...


class SweepLease(Protocol):
    """The right to remove objects, as long as it is renewed."""

    def renew(self) -> float:
        """Renew it if that is due. Returns until when the store accepts removals, in Unix seconds by its clock."""

    def wait(self, seconds: float) -> None:
        """Wait for publishers that have not seen the lease, unless the lease itself has waited for them."""

    def now_s(self) -> float:
        """Unix seconds by the store's clock, which is that of `StoredObject.last_modified_s`."""


class Store(Protocol):
    """Thread-safe. Methods raise Unavailable, Exhausted (DISK_FULL), and Corrupt if a single object cannot be read.

    What a method has written when it returns survives a power cut. A folder that does not exist is empty. A store whose
    writes have several steps takes a `StepHook` (`shared/registry/folder_store.py`) and calls it with `NAME:KIND`.
    KIND is the first part of the path; tests of crashes kill it there.
    """

    # How many objects are worth reading at once.
    max_parallel_reads: int

    def create(self, path: str, data: bytes) -> bool:
        """Create an object. Returns False if it already exists.

        If an answer is lost and the attempt repeated, the result may be False although this call created the object.
        """

    def replace(self, path: str, data: bytes) -> None:
        """Overwrite an object. Only for damaged contents, and what a store keeps for itself."""

    def sync(self, path: str) -> None:
        """Make an object that another process created survive a power cut, because that process may have died before it
        could."""

    def get(self, path: str, check_size: Callable[[int], None] = ...) -> bytes | None:
        """Return an object, or None if it does not exist. `check_size`, which does nothing by default, gets its size
        before it is read, and may raise."""

    def exists(self, path: str) -> bool: ...

    def remove(self, path: str) -> None:
        """Remove an object. Does nothing if it does not exist."""

    def remove_before(self, path: str, before_s: float) -> None:
        """Remove an object for the holder of the sweep's lease, not later than `before_s` by the store's clock."""

    def names(self, folder: str, *, after: str = "") -> list[str]:
        """List the names of objects in `folder`, which has no folders, in order; only those greater than `after`."""

    def folders(self, folder: str) -> list[str]:
        """List the folders in `folder` in order."""

    def objects(self, folder: str) -> Iterator[StoredObject]:
        """Iterate over all objects in `folder` and the folders in it. Their names are without the folders."""

    def publishing(self) -> AbstractContextManager[SweepWatch]:
        """A block in which contents are stored and then named by a record.
        How it and `sweeping` keep apart: docs/decisions/018."""

    def sweeping(self, *, dead_s: float) -> AbstractContextManager[SweepLease]:
        """A block in which objects may be removed.
        A holder that has not renewed its lease for `dead_s` is taken for dead.

        Raises Conflict (SWEEP_RUNNING), Unavailable (LOCKED).
        """

    def check_removals(self) -> None:
        """Check that `remove_before` keeps its promise. Raises PreconditionFailed (NO_EXPIRING_REQUESTS)."""


def registry_id(store: Store) -> str:
    """Return the id of the registry, which its first client creates.

    Raises PreconditionFailed (SCHEMA_TOO_NEW, NO_CONDITIONAL_WRITES), Corrupt.
    """
    marker = store.get(_MARKER)
    if marker is None:
        new_marker = seal({"schema_version": SCHEMA_VERSION, "registry_id": uuid.uuid4().hex})
        if store.create(_MARKER, new_marker) and store.create(_MARKER, new_marker):
            raise PreconditionFailed(
                "the object store ignores If-None-Match and overwrites objects; a registry needs conditional writes",
                reason="NO_CONDITIONAL_WRITES",
            )
        marker = store.get(_MARKER)
    record = open_sealed(marker or b"", _MARKER)
    if record["schema_version"] > SCHEMA_VERSION:
        raise PreconditionFailed(
            "the registry was written by a newer neap; upgrade neap, or use another folder, bucket or prefix",
            reason="SCHEMA_TOO_NEW",
            metadata={"found": str(record["schema_version"]), "supported": str(SCHEMA_VERSION)},
        )
    return str(record["registry_id"])
