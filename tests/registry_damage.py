"""Damaging what a registry has stored, as a disk or a person may: cutting an object short, flipping a bit, removing
it."""

import obstore
from obstore.store import S3Store

from tests.servers import BUCKET, S3Server


def content_path(kind: str, digest: str) -> str:
    """Below the registry's root, alike in folders and buckets."""
    hexadecimal = digest.removeprefix("sha256:")
    return f"{kind}/sha256/{hexadecimal[:2]}/{hexadecimal}"


def damaged(data: bytes, damage: str) -> bytes:
    """`damage`: "truncate" or "flip"."""
    middle = len(data) // 2
    if damage == "truncate":
        return data[:middle]
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def bucket_of(s3: S3Server, prefix: str) -> S3Store:
    return S3Store(BUCKET, prefix=prefix, endpoint=s3.endpoint, client_options={"allow_http": True})


def harm(bucket: S3Store, path: str, damage: str) -> None:
    """`damage`: "truncate", "flip" or "delete"."""
    if damage == "delete":
        obstore.delete(bucket, path)
    else:
        obstore.put(bucket, path, damaged(bytes(obstore.get(bucket, path).bytes()), damage))
