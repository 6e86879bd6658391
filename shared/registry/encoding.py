"""The encoding of manifests and of small records.

It is canonical JSON: UTF-8, keys sorted by code point, no white space, unescaped non-ASCII characters, only finite
numbers, and floats in Python's shortest round-trip form. Readers compute digests of the stored bytes and never
re-encode them, so other languages need not reproduce the number format.

A sealed record is canonical JSON of {"digest": "sha256:..", "record": {...}}, so that a reader detects truncated or
changed records. The digest is that of the record's canonical JSON, which is the stored bytes between `,"record":` and
the last brace.
"""

import json
from collections.abc import Mapping
from typing import Any

from shared.digests import digest_of
from shared.errors import Corrupt, InvalidInput


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """Encode `value`. Raises InvalidInput for values that JSON cannot represent: NaN, infinities, other types, non-text
    keys."""
    _check_keys(value, "manifest")
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput("the manifest contains a value that JSON cannot represent", reason="BAD_MANIFEST") from error


def _check_keys(value: Any, where: str) -> None:
    # json.dumps would silently turn the keys 1 and True into "1" and "true".
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidInput(f"{where} has a key that is not text", reason="BAD_MANIFEST")
            _check_keys(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item, where)


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
