"""Reads small files: certificates, keys, tokens."""

from pathlib import Path

from neap_client.errors import InvalidInput

MAX_FILE_BYTES = 1 << 20


def read_capped(path: Path) -> bytes:
    """Read a file. Raises InvalidInput (BAD_CONFIGURATION) if it cannot be read or is larger than MAX_FILE_BYTES."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", reason="BAD_CONFIGURATION") from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(f"{path} is larger than {MAX_FILE_BYTES} bytes", reason="BAD_CONFIGURATION")
    return data
