"""Digests of what is stored or named: "sha256:<64 hex>"."""

import hashlib
import re

PREFIX = "sha256:"
DIGEST_PATTERN = re.compile(rf"{PREFIX}[0-9a-f]{{64}}")


def digest_of(*parts: bytes) -> str:
    """Return the digest of the parts, one after another."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return PREFIX + digest.hexdigest()
