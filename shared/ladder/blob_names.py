"""The files of a published router, by name. Free of torch."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from shared.digests import digest_of

MANIFEST = "manifest.json"
# What workers load.
LADDER_BLOB = "ladder.safetensors"
MAX_BLOB_BYTES = 1 << 30
# The LADDER_BLOB of the router whose heads the ladder has, if it has another's.
HEADS_BLOB = "heads.safetensors"
# The sums that the ladder was solved from, for calibrations that go on from it. A router may lack it.
STATISTICS_BLOB = "statistics.safetensors"
# The signature over the other files of the router (`shared.exchange.signatures`). A router may lack it.
SIGNATURE_BLOB = "model.sig"
OPTIONAL_BLOBS = (STATISTICS_BLOB, SIGNATURE_BLOB)


def served_blobs(names: Iterable[str]) -> list[str]:
    """The blobs that a worker needs to serve the router: all but the statistics and the signature."""
    return [name for name in names if name not in OPTIONAL_BLOBS]


def heads_blob(names: Iterable[str]) -> str:
    """The blob of a router that its heads are in."""
    return HEADS_BLOB if HEADS_BLOB in names else LADDER_BLOB


def blob_entry(data: bytes) -> dict[str, Any]:
    """What manifests say about a blob."""
    return {"digest": digest_of(data), "size_bytes": len(data)}


def manifest_file(manifest: Mapping[str, Any], entries: Mapping[str, Any]) -> bytes:
    """The bytes of manifest.json, which a signature covers. `entries`: of the blobs, as a registry adds them to the
    manifest as "blobs"; that of the signature is left out, because it could not sign its own digest."""
    signed = {name: entry for name, entry in entries.items() if name != SIGNATURE_BLOB}
    return (json.dumps({**manifest, "blobs": signed}, indent=1, sort_keys=True) + "\n").encode()
