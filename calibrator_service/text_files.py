"""Checks which text files a calibration may read."""

from collections.abc import Sequence
from pathlib import Path

from shared.errors import InvalidInput, NotFound

SUFFIXES = (".txt", ".jsonl")


def find_text_file(path: str, folders: Sequence[Path]) -> Path:
    """The real path of a .txt or .jsonl file that lies under one of `folders`, symlinks resolved on both sides.

    A relative path is looked up in each folder in turn. Raises InvalidInput (PATH_NOT_ALLOWED, BAD_TEXT_FILE) and NotFound
    (TEXT_FILE_NOT_FOUND). An error does not reveal whether a file outside the folders exists.
    """
    if not path or "\x00" in path:
        raise InvalidInput("the text file has no valid path", reason="BAD_TEXT_FILE")
    if not folders:
        raise InvalidInput(
            "this service was not configured to read text files (--text-folder)",
            reason="PATH_NOT_ALLOWED",
        )
    roots = [folder.resolve() for folder in folders]
    try:
        candidates = [(root / path).resolve() for root in roots]
        allowed = [found for found in candidates if any(map(found.is_relative_to, roots))]
        files = [found for found in allowed if found.is_file()]
    except (OSError, RuntimeError) as error:  # the name is too long, or symlinks form a loop
        raise InvalidInput("the text file has no valid path", reason="BAD_TEXT_FILE") from error
    if not allowed:
        raise InvalidInput(
            f"{path!r} is not under a folder this service was configured to read",
            reason="PATH_NOT_ALLOWED",
        )
    if not files:
        raise NotFound(f"there is no text file {path!r}", reason="TEXT_FILE_NOT_FOUND")
    if files[0].suffix not in SUFFIXES:
        raise InvalidInput(f"{path!r} is neither .txt nor .jsonl", reason="BAD_TEXT_FILE")
    return files[0]
