"""Digests, and the one way to write a manifest as bytes.

Canonical here means: UTF-8, keys sorted by code point, no white space, non-ASCII characters as themselves, finite numbers only,
floats as Python's shortest round-trip form. Readers digest the stored bytes and never re-encode them, so no other language has
to reproduce the number format.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidInput

DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")


def digest_of(data: bytes) -> str:
    """ "sha256:<64 hex>" of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """Raises InvalidInput for what JSON cannot hold: NaN, infinities, other types, keys that are not text."""
    _check_keys(value, "manifest")
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            "the manifest holds something that JSON cannot", reason="BAD_MANIFEST"
        ) from error


def _check_keys(value: Any, where: str) -> None:
    # json.dumps would quietly turn 1 and True into "1" and "true".
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidInput(f"{where} has a key that is not text", reason="BAD_MANIFEST")
            _check_keys(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item, where)
