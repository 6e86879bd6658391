"""Small records that contain their own digest, so that a reader detects truncated or changed records.

A sealed record is canonical JSON of {"digest": "sha256:..", "record": {...}}. The digest is that of the record's
canonical JSON, which is the stored bytes between `,"record":` and the last brace.
"""

import json
from collections.abc import Mapping
from typing import Any

from shared.digests import digest_of
from shared.errors import Corrupt
from shared.registry.canonical import canonical_json


def seal(record: Mapping[str, Any]) -> bytes:
    """Encode a record with its digest. Raises InvalidInput for values that JSON cannot represent."""
    return canonical_json({"digest": digest_of(canonical_json(record)), "record": record})


def open_sealed(data: bytes, name: str) -> dict[str, Any]:
    """Decode and check a record. `name` is for messages.
    Raises Corrupt with metadata expected_digest and actual_digest."""
    encoded = data.partition(b',"record":')[2][:-1]
    actual = digest_of(encoded) if encoded else ""
    try:
        outer = json.loads(data)
        expected, record = str(outer["digest"]), outer["record"]
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(name, "", actual) from error
    if actual != expected or not isinstance(record, dict):
        raise _corrupt(name, expected, actual)
    return record


def _corrupt(name: str, expected: str, actual: str) -> Corrupt:
    return Corrupt(
        f"the stored record {name} does not match its digest",
        metadata={"expected_digest": expected[:80], "actual_digest": actual, "kind": "record"},
    )
