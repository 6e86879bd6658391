"""Downloads objects of a bucket to files. A download goes on where it stopped, also in a later process."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import S3Store

from shared.errors import Corrupt, Unavailable

if TYPE_CHECKING:  # the library has them for type checkers only
    from obstore import GetOptions, ObjectMeta

# A download has as much time as it takes, but not without any byte for this long.
STALL_S = 30.0
# Attempts, one after the other, that brought no byte.
MAX_IDLE_ATTEMPTS = 6
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 16.0
# What an attempt that fails may lose.
CHUNK_BYTES = 64 << 10
# After so many bytes the file is on the disk. A later process trusts no bytes beyond.
SYNC_BYTES = 64 << 20
PART = ".part"
SYNCED = ".synced"
# What another attempt does not change.
FINAL = (NotFoundError, PermissionDeniedError, PreconditionError, UnauthenticatedError)


def open_bucket(bucket: str, prefix: str) -> S3Store:
    """Return a client of the bucket. Credentials, region and endpoint come from the variables AWS_*."""
    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options={
            "allow_http": True,
            "timeout": timedelta(days=365),  # of a whole request; the library's own is 30 s
            "read_timeout": timedelta(seconds=STALL_S),
        },
        retry_config={"max_retries": 0},
    )


def download(store: S3Store, item: "ObjectMeta", target: Path, say: Callable[[str], object]) -> None:
    """Download the object `item` to the file `target`, unless it is there. Its folder exists.
    `say` gets a line about what happens.

    All bytes come from the object with the ETag of `item`, and there are as many as it has. Raises Unavailable
    (BUCKET_UNAVAILABLE) if nothing arrives any more, or if the object has changed.
    """
    part = target.with_name(target.name + PART)
    mark = target.with_name(target.name + SYNCED)
    if target.exists():
        mark.unlink(missing_ok=True)
        return
    say(f"fetching {item['path']} ({item['size'] / 1e6:.1f} MB)")
    with part.open("ab") as file:
        # A mark that was just being written when the machine ended is empty or too low.
        file.truncate(int(mark.read_text() or 0) if mark.exists() else 0)
        file.seek(0, os.SEEK_END)
        num_idle = 0
        while (before := file.tell()) < item["size"]:
            if before:
                say(f"{target.name} continues at {before / 1e6:.0f} MB")
            try:
                _receive(store, item, file, mark)
            except FINAL as error:
                raise Unavailable(
                    f"{item['path']} cannot be fetched, or has changed: {summary(error)}", reason="BUCKET_UNAVAILABLE"
                ) from error
            except BaseError as error:
                num_idle = num_idle + 1 if file.tell() == before else 0
                if num_idle == MAX_IDLE_ATTEMPTS:
                    raise Unavailable(
                        f"{item['path']} stands still at {before} of {item['size']} bytes: {summary(error)}",
                        reason="BUCKET_UNAVAILABLE",
                    ) from error
                time.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**num_idle))
        _sync(file, mark)
        if file.tell() != item["size"]:
            mark.unlink()
            raise Corrupt(f"{item['path']} brought {file.tell()} bytes, not {item['size']}")
    part.rename(target)
    mark.unlink()


def summary(error: BaseError) -> str:
    """Return the line that says what happened. The library adds the insides of its own objects."""
    return str(error).partition("\n")[0]


def _receive(store: S3Store, item: "ObjectMeta", file: IO[bytes], mark: Path) -> None:
    """Append what one request brings."""
    options: GetOptions = {"if_match": item["e_tag"]}
    if file.tell():
        options["range"] = {"offset": file.tell()}
    unsynced = 0
    try:
        for chunk in obstore.get(store, item["path"], options=options).stream(CHUNK_BYTES):
            file.write(chunk)
            unsynced += len(chunk)
            if unsynced >= SYNC_BYTES:
                _sync(file, mark)
                unsynced = 0
    finally:
        _sync(file, mark)


def _sync(file: IO[bytes], mark: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    mark.write_text(str(file.tell()))
