"""Encryption of what is kept of answers, with a key from a file: AES-256-GCM, a random nonce for each object."""

import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shared.errors import Corrupt, InvalidInput

_KEY_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 12, 16
ADDED_BYTES = _NONCE_BYTES + _TAG_BYTES


def read_key(file: Path) -> bytes:
    """Read a key: 64 hexadecimal digits, as `openssl rand -hex 32` writes them. Raises InvalidInput (BAD_TRAFFIC_KEY),
    whose text has nothing of the file."""
    try:
        with file.open("rb") as opened:
            text = opened.read(1024).decode("ascii").strip()
        key = bytes.fromhex(text)
    except (OSError, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise InvalidInput(
            f"{file} cannot be read or is no key: it must contain 64 hexadecimal digits (openssl rand -hex 32)",
            reason="BAD_TRAFFIC_KEY",
        )
    return key


def encrypt(key: bytes, data: bytes, place: bytes) -> bytes:
    """Encrypt `data`, which can be decrypted only where it has the same `place`."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, data, place)


def decrypt(key: bytes, data: bytes, place: bytes) -> bytes:
    """Raises Corrupt for data that were changed, cut, moved or encrypted with another key."""
    try:
        return AESGCM(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], place)
    except (InvalidTag, ValueError) as error:
        raise Corrupt("the object was not encrypted for this place with this key") from error
