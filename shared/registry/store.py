"""The interface of the stores: a folder or a bucket of objects under paths with '/', the same paths in both.

neap-registry.json                      id and schema of the registry
blobs/sha256/ab/<hex>                   content, named by its digest
manifests/sha256/ab/<hex>
models/<model id, '/' as '!'>/journal/<20 digits>.json     see journal.py
requests/<sha256 of a request id>.json  the model to which a request id belongs
publications/<random>, sweeps/<random>  empty; exist while somebody publishes or sweeps, see marks.py
leases/<name>/<20 digits>               the last terms of a lease, see lease.py
notes/<name>.json                       what a service keeps for its next start, replaced as a whole
parts/<random>                          in a folder: what is being written
traffic/..                              served answers to learn from, see shared/traffic/traffic.py
"""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from shared.errors import PreconditionFailed
from shared.registry.encoding import open_sealed, seal

# The form of the registry and of each record of its journals. 1 and 2 were forms before the first release.
SCHEMA_VERSION = 3
_MARKER = "neap-registry.json"
# What clients have sent and got: not for other users of a machine.
PRIVATE = ("traffic",)


@dataclass(frozen=True)
class StoredObject:
    """`last_modified_s`: Unix seconds by the store's clock."""

    path: str
    size_bytes: int
    last_modified_s: float

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


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
        """Overwrite an object, or create it. Readers see the old or the new one.
        Only for notes and damaged contents."""

    def sync(self, path: str) -> None:
        """Make an object that another process created survive a power cut, because that process may have died before it
        could."""

    def get(self, path: str, check_size: Callable[[int], None] = ...) -> bytes | None:
        """Return an object, or None if it does not exist. `check_size`, which does nothing by default, gets its size
        before it is read, and may raise."""

    def exists(self, path: str) -> bool: ...

    def remove(self, path: str) -> None:
        """Remove an object. Does nothing if it does not exist. Never repeats a request: it would be a late one."""

    def last_modified_s(self, path: str) -> float:
        """Return when an object was written, in Unix seconds by the store's clock.
        Raises Unavailable if it does not exist."""

    def names(self, folder: str, *, after: str = "") -> list[str]:
        """List the names of objects in `folder`, which has no folders, in order; only those greater than `after`."""

    def folders(self, folder: str) -> list[str]:
        """List the folders in `folder` in order."""

    def objects(self, folder: str) -> Iterator[StoredObject]:
        """Iterate over all objects in `folder` and the folders in it."""


def registry_id(store: Store) -> str:
    """Return the id of the registry, which its first client creates.

    Raises PreconditionFailed (SCHEMA_TOO_NEW, SCHEMA_TOO_OLD, NO_CONDITIONAL_WRITES), Corrupt.
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
    check_schema(record["schema_version"])
    return str(record["registry_id"])


def check_schema(found: int) -> None:
    """Raise PreconditionFailed (SCHEMA_TOO_NEW, SCHEMA_TOO_OLD) for a registry or record of another schema."""
    metadata = {"found": str(found), "supported": str(SCHEMA_VERSION)}
    if found > SCHEMA_VERSION:
        raise PreconditionFailed(
            "the registry has been written by a newer neap; upgrade neap, or use another folder, bucket or prefix",
            reason="SCHEMA_TOO_NEW",
            metadata=metadata,
        )
    if found < SCHEMA_VERSION:
        raise PreconditionFailed(
            "the registry has the form that neap had before version 0.1.0; use a new folder, bucket or prefix, and "
            "calibrate again",
            reason="SCHEMA_TOO_OLD",
            metadata=metadata,
        )
