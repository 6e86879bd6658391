"""The canonical encoding of a manifest.

The encoding is UTF-8 JSON with keys sorted by code point, no white space, unescaped non-ASCII characters, only finite
numbers, and floats in Python's shortest round-trip form. Readers compute digests of the stored bytes and never
re-encode them, so other languages need not reproduce the number format.
"""

import json
from collections.abc import Mapping
from typing import Any

from shared.errors import InvalidInput


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
