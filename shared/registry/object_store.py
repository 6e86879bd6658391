"""A bucket of immutable objects, which are created only if absent (If-None-Match: *). Contents are read back and checked.

neap-registry.json                      id and schema of the registry
blobs/sha256/ab/<hex>                   content, named by its digest
manifests/sha256/ab/<hex>
models/<model id, '/' as '!'>/journal/<20 digits>.json     see journal.py
requests/<sha256 of a request id>.json  the model to which a request id belongs
probes/<random>                         empty; exists for a moment, see `check_writable`
sweep.json                              exists while a sweep runs, see lease.py; the only object that changes
"""

import random
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPException
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from shared.errors import NeapError, PreconditionFailed, Unavailable
from shared.registry.address import SharedAddress
from shared.registry.blobs import StepHook
from shared.registry.canonical import DIGEST_PATTERN, digest_of
from shared.registry.contents import (
    Kind,
    check_digest,
    check_size,
    content_damaged,
    content_path,
)
from shared.registry.sealed import open_sealed, seal
from shared.registry.timed_removal import send_removal, signed_removal
from shared.timeouts import (
    OBJECT_STORE_CONFLICT_PAUSES_S,
    OBJECT_STORE_CONNECT_S,
    OBJECT_STORE_CONTENT_S,
    OBJECT_STORE_RECORD_S,
    OBJECT_STORE_RETRY_S,
    OBJECT_STORE_SENDING_STALL_S,
    OBJECT_STORE_STALL_S,
)

if TYPE_CHECKING:  # the library has these for type checkers only
    from obstore.store import ClientConfig, RetryConfig, S3Config

SCHEMA_VERSION = 1
_MARKER = "neap-registry.json"
_MAX_CACHED_MANIFESTS = 64
# How long a probe of `check_removals` is accepted.
PROBE_S = 2.0


@dataclass(frozen=True)
class StoredContent:
    """A blob or manifest in the bucket. `last_modified_s`: Unix seconds by the store's clock."""

    digest: str
    size_bytes: int
    last_modified_s: float


class ObjectStore:
    """A thread-safe client of the bucket. Methods raise Unavailable (OBJECT_STORE_UNAVAILABLE, OBJECT_STORE_REFUSED)."""

    def __init__(self, address: SharedAddress, *, step: StepHook = lambda name: None) -> None:
        self._step = step
        # Requests for small records have a short timeout; large contents may take longer.
        self._small = _client(address, OBJECT_STORE_RECORD_S, OBJECT_STORE_RECORD_S)
        self._large = _client(address, OBJECT_STORE_CONTENT_S, OBJECT_STORE_STALL_S)
        self._sending = _client(address, OBJECT_STORE_CONTENT_S, OBJECT_STORE_SENDING_STALL_S)
        self._manifests: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def registry_id(self) -> str:
        """Return the id of the registry, which the first client creates.

        Raises PreconditionFailed (SCHEMA_TOO_NEW, NO_CONDITIONAL_WRITES), Corrupt.
        """
        found = self.get(_MARKER)
        if found is None:
            made = seal({"schema_version": SCHEMA_VERSION, "registry_id": uuid.uuid4().hex})
            if self.create(_MARKER, made) and self.create(_MARKER, made):
                raise PreconditionFailed(
                    "the object store ignores If-None-Match and overwrites objects; a registry needs conditional writes",
                    reason="NO_CONDITIONAL_WRITES",
                )
            found = self.get(_MARKER)
        record = open_sealed(found or b"", _MARKER)
        if record["schema_version"] > SCHEMA_VERSION:
            raise PreconditionFailed(
                "the registry was written by a newer neap; upgrade neap, or use another bucket or prefix",
                reason="SCHEMA_TOO_NEW",
                metadata={
                    "found": str(record["schema_version"]),
                    "supported": str(SCHEMA_VERSION),
                },
            )
        return str(record["registry_id"])

    def check_writable(self) -> None:
        """Create an object and remove it."""
        path = f"probes/{uuid.uuid4().hex}"
        self.create(path, b"")
        self.remove(path)

    def put_content(self, kind: Kind, data: bytes) -> str:
        """Store `data`, read it back and return its digest. A damaged object under this digest is replaced. Raises Corrupt."""
        digest = digest_of(data)
        path = content_path(kind, digest)
        there = self._get(self._large, path)
        if there is not None and digest_of(there) == digest:
            return digest
        self._step(f"write:{kind}")
        with _errors():
            if there is not None:
                obstore.put(self._sending, path, data, use_multipart=False)
            else:
                # Another publisher of the same bytes may be faster. They are read back in any case.
                self._create(self._sending, path, data)
        self._step(f"written:{kind}")
        self.read(kind, digest)
        self._step(f"verified:{kind}")
        return digest

    def read(self, kind: Kind, digest: str, size_bytes: int | None = None) -> bytes:
        """Read a content and check its digest. A content of another size than `size_bytes`, or a too large manifest, is not read.

        Raises Corrupt with metadata expected_digest and actual_digest ("" if it is missing or was not read).
        """
        data = self._get(
            self._large,
            content_path(kind, digest),
            lambda found_bytes: check_size(kind, digest, found_bytes, size_bytes),
        )
        if data is None:
            raise content_damaged(kind, digest, "is missing")
        return check_digest(kind, digest, data)

    def read_manifest(self, digest: str, *, is_fresh: bool = False) -> bytes:
        """Read a manifest and check its digest. Raises Corrupt.

        The last used manifests stay in memory, because every request needs one. `is_fresh` bypasses the memory.
        """
        with self._lock:
            if digest in self._manifests and not is_fresh:
                self._manifests.move_to_end(digest)
                return self._manifests[digest]
        data = self.read("manifests", digest)
        with self._lock:
            self._manifests[digest] = data
            self._manifests.move_to_end(digest)
            while len(self._manifests) > _MAX_CACHED_MANIFESTS:
                self._manifests.popitem(last=False)
        return data

    def claim(self, request_id: str, model_id: str) -> str:
        """Assign `request_id` to `model_id` unless it is already assigned. Returns the model to which it belongs."""
        path = f"requests/{digest_of(request_id.encode()).removeprefix('sha256:')}.json"
        record = {"request_id": request_id, "model_id": model_id}
        if self.create(path, seal(record)):
            return model_id
        return str(open_sealed(self.get(path) or b"", path)["model_id"])

    def create(self, path: str, data: bytes) -> bool:
        """Create an object. Returns False if it already exists.

        If an answer is lost and the attempt repeated, the result may be False although this call created the object.
        """
        return self._create(self._small, path, data)

    def _create(self, client: S3Store, path: str, data: bytes) -> bool:
        # S3 refuses a write also while another one of the same object is in progress (409 ConditionalRequestConflict), and the library
        # reports both refusals alike.
        for pause_s in (*OBJECT_STORE_CONFLICT_PAUSES_S, 0.0):
            with _errors():
                try:
                    obstore.put(client, path, data, mode="create", use_multipart=False)
                except AlreadyExistsError:
                    if self.exists(path):
                        return False
                else:
                    return True
            time.sleep(pause_s * random.uniform(0.5, 1.5))
        raise _unavailable("refuses concurrent writes of one object", "OBJECT_STORE_BUSY")

    def get(self, path: str) -> bytes | None:
        """Return a small object, or None if it does not exist."""
        return self._get(self._small, path)

    def _get(
        self, client: S3Store, path: str, check_size: Callable[[int], None] = lambda _: None
    ) -> bytes | None:
        """Return an object, or None if it does not exist. `check_size` gets its size before it is read, and may raise."""
        with _errors():
            try:
                answer = obstore.get(client, path)
            except FileNotFoundError:
                return None
            check_size(answer.meta["size"])
            return bytes(answer.bytes())

    def exists(self, path: str) -> bool:
        with _errors():
            try:
                obstore.head(self._small, path)
            except FileNotFoundError:
                return False
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Overwrite an object. Only for leases, the only objects that change, and damaged records."""
        with _errors():
            obstore.put(self._small, path, data, use_multipart=False)

    def remove(self, path: str) -> None:
        """Remove an object. Does nothing if it does not exist."""
        with _errors(), suppress(FileNotFoundError):
            obstore.delete(self._small, path)

    def remove_before(self, path: str, before_s: float) -> None:
        """Remove an object by a request that the store refuses after `before_s`, in Unix seconds by its own clock.

        Raises Unavailable (also SWEEP_TOO_SLOW).
        """
        with _errors():
            url, _ = signed_removal(self._small, path, before_s)
            if not send_removal(url):
                raise Unavailable(
                    "the registry's object store refuses a removal: it came too late, or the credentials do not allow it",
                    reason="OBJECT_STORE_REFUSED",
                )

    def check_removals(self) -> None:
        """Check that the store refuses a removal that comes too late. Raises PreconditionFailed (NO_EXPIRING_REQUESTS)."""
        path = f"probes/{uuid.uuid4().hex}"
        self.create(path, b"")
        with _errors():
            url, ends_at_s = signed_removal(self._small, path, time.time() + PROBE_S)
            while self.last_modified_s(path) <= ends_at_s:
                time.sleep(PROBE_S / 4)
                self.replace(path, b"")
            send_removal(url)
        if not self.exists(path):
            raise PreconditionFailed(
                "the object store accepts signed requests whose time has passed; a sweep could remove what is in use",
                reason="NO_EXPIRING_REQUESTS",
            )
        self.remove(path)

    def last_modified_s(self, path: str) -> float:
        """Return the time of the last write in Unix seconds by the store's clock. Raises Unavailable, also if the object is missing."""
        with _errors():
            return obstore.head(self._small, path)["last_modified"].timestamp()

    def has_content(self, kind: Kind, digest: str) -> bool:
        return self.exists(content_path(kind, digest))

    def contents(self, kind: Kind) -> Iterator[StoredContent]:
        """Iterate over all contents of a kind."""
        with _errors():
            for page in obstore.list(self._small, f"{kind}/sha256/"):
                for entry in page:
                    digest = f"sha256:{entry['path'].rpartition('/')[2]}"
                    if DIGEST_PATTERN.fullmatch(digest):
                        written_s = entry["last_modified"].timestamp()
                        yield StoredContent(digest, entry["size"], written_s)

    def remove_content(self, kind: Kind, digest: str, before_s: float) -> None:
        """See `remove_before`. Only for the holder of the lease."""
        self.remove_before(content_path(kind, digest), before_s)

    def names(self, folder: str, *, after: str = "") -> list[str]:
        """List the names in `folder` in order, beginning after `after`."""
        with _errors():
            found: list[str] = []
            offset = f"{folder}/{after}" if after else None
            for page in obstore.list(self._small, f"{folder}/", offset=offset):
                found.extend(entry["path"].rpartition("/")[2] for entry in page)
            return sorted(found)

    def folders(self, folder: str) -> list[str]:
        """List the folders in `folder` in order."""
        with _errors():
            found = obstore.list_with_delimiter(self._small, f"{folder}/")["common_prefixes"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)


def _client(address: SharedAddress, timeout_s: int, stall_s: int) -> S3Store:
    # Settings that the URL does not give are left to the library, which reads AWS_* variables.
    config: S3Config = {}
    options: ClientConfig = {
        "connect_timeout": f"{OBJECT_STORE_CONNECT_S}s",
        "timeout": f"{timeout_s}s",
        "read_timeout": f"{stall_s}s",
    }
    if address.region is not None:
        config["region"] = address.region
    if address.endpoint is not None:
        config["endpoint"] = address.endpoint
        options["allow_http"] = address.endpoint.startswith("http://")
    prefix = address.prefix or None
    retry: RetryConfig = {
        "max_retries": 1,
        "retry_timeout": timedelta(seconds=OBJECT_STORE_RETRY_S),
    }
    with _errors():
        return S3Store(
            address.bucket,
            prefix=prefix,
            config=config,
            client_options=options,
            retry_config=retry,
        )


@contextmanager
def _errors() -> Iterator[None]:
    # The library's texts may contain addresses and parts of answers, so they stay in the chained exception.
    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise _unavailable("refuses the credentials", "OBJECT_STORE_REFUSED") from error
    except (BaseError, OSError, HTTPException) as error:
        raise _unavailable("does not answer", "OBJECT_STORE_UNAVAILABLE") from error


def _unavailable(what: str, reason: str) -> NeapError:
    return Unavailable(f"the registry's object store {what}", reason=reason)
