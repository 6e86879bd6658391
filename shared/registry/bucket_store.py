"""A `Store` in a bucket. Objects are created only if absent (If-None-Match: *)."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from shared.errors import NeapError, Unavailable
from shared.registry.address import RegistryAddress
from shared.registry.store import StoredObject
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

# Where large objects are.
CONTENTS = ("blobs/", "manifests/", "traffic/")


class BucketStore:
    """A thread-safe client of the bucket. Methods raise Unavailable (OBJECT_STORE_UNAVAILABLE,
    OBJECT_STORE_REFUSED)."""

    max_parallel_reads = 16

    def __init__(self, address: RegistryAddress) -> None:
        # Requests for small records have a short timeout; large contents may take longer.
        self._small = _client(address, OBJECT_STORE_RECORD_S, OBJECT_STORE_RECORD_S)
        self._removing = _client(address, OBJECT_STORE_RECORD_S, OBJECT_STORE_RECORD_S, max_retries=0)
        self._large = _client(address, OBJECT_STORE_CONTENT_S, OBJECT_STORE_STALL_S)
        self._sending = _client(address, OBJECT_STORE_CONTENT_S, OBJECT_STORE_SENDING_STALL_S)

    def create(self, path: str, data: bytes) -> bool:
        client = self._sending if path.startswith(CONTENTS) else self._small
        # S3 refuses a write also while another one of the same object is in progress (409 ConditionalRequestConflict),
        # and the library reports both refusals alike.
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

    def sync(self, path: str) -> None:
        """Nothing to do: an object that is seen is stored."""

    def get(self, path: str, check_size: Callable[[int], None] = lambda size_bytes: None) -> bytes | None:
        client = self._large if path.startswith(CONTENTS) else self._small
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
        client = self._sending if path.startswith(CONTENTS) else self._small
        with _errors():
            obstore.put(client, path, data, use_multipart=False)

    def remove(self, path: str) -> None:
        with _errors(), suppress(FileNotFoundError):
            obstore.delete(self._removing, path)

    def last_modified_s(self, path: str) -> float:
        with _errors():
            return obstore.head(self._small, path)["last_modified"].timestamp()

    def objects(self, folder: str) -> Iterator[StoredObject]:
        with _errors():
            for page in obstore.list(self._small, f"{folder}/"):
                for entry in page:
                    yield StoredObject(entry["path"], entry["size"], entry["last_modified"].timestamp())

    def names(self, folder: str, *, after: str = "") -> list[str]:
        with _errors():
            names: list[str] = []
            offset = f"{folder}/{after}" if after else None
            for page in obstore.list(self._small, f"{folder}/", offset=offset):
                names.extend(entry["path"].rpartition("/")[2] for entry in page)
            return sorted(names)

    def folders(self, folder: str) -> list[str]:
        with _errors():
            prefixes = obstore.list_with_delimiter(self._small, f"{folder}/")["common_prefixes"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in prefixes)


def _client(address: RegistryAddress, timeout_s: int, stall_s: int, *, max_retries: int = 1) -> S3Store:
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
    retry: RetryConfig = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=OBJECT_STORE_RETRY_S)}
    with _errors():
        return S3Store(address.bucket, prefix=prefix, config=config, client_options=options, retry_config=retry)


@contextmanager
def _errors() -> Iterator[None]:
    # The library's texts may contain addresses and parts of answers, so they stay in the chained exception.
    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise _unavailable("refuses the credentials", "OBJECT_STORE_REFUSED") from error
    except (BaseError, OSError) as error:
        raise _unavailable("does not answer", "OBJECT_STORE_UNAVAILABLE") from error


def _unavailable(what: str, reason: str) -> NeapError:
    return Unavailable(f"the registry's object store {what}", reason=reason)
