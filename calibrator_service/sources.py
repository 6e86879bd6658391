"""Which texts a calibration of this service may read: files of some folders, and datasets of the Hub that are allowed
by name."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibrator_service.calibration.spec import AnswerFile, HubDataset, Source, TextFile
from calibrator_service.hub_datasets import check_allowed, check_hub_dataset, is_public_only
from shared.calibrator_settings import CalibratorSettings
from shared.errors import InvalidInput, NotFound

SUFFIXES = (".txt", ".jsonl")


def allowed_source(source: Source, settings: CalibratorSettings) -> Source:
    """The source with the real path of its file, or with the access to its dataset. Raises as `find_text_file`,
    `check_hub_dataset` and `check_allowed`."""
    if isinstance(source, HubDataset):
        name = source.name
        check_hub_dataset(name, config=source.config, split=source.split, field=source.field)
        check_allowed(name, settings.hub_datasets)
        return replace(source, public_only=is_public_only(name, settings.hub_datasets))
    if isinstance(source, TextFile | AnswerFile):
        return replace(source, path=str(find_text_file(source.path, settings.text_folders)))
    return source


def find_text_file(path: str, folders: Sequence[Path]) -> Path:
    """The real path of a .txt or .jsonl file that lies under one of `folders`, symlinks resolved on both sides.

    A relative path is looked up in each folder in turn. Raises InvalidInput (PATH_NOT_ALLOWED, BAD_TEXT_FILE) and
    NotFound (TEXT_FILE_NOT_FOUND). An error does not reveal whether a file outside the folders exists.
    """
    if not path or "\x00" in path:
        raise InvalidInput("the text file has no valid path", reason="BAD_TEXT_FILE")
    if not folders:
        raise InvalidInput(
            "this service was not configured to read text files (--text-folder)", reason="PATH_NOT_ALLOWED"
        )
    roots = [folder.resolve() for folder in folders]
    try:
        candidates = [(root / path).resolve() for root in roots]
        allowed = [candidate for candidate in candidates if any(map(candidate.is_relative_to, roots))]
        files = [candidate for candidate in allowed if candidate.is_file()]
    except (OSError, RuntimeError) as error:  # the name is too long, or symlinks form a loop
        raise InvalidInput("the text file has no valid path", reason="BAD_TEXT_FILE") from error
    if not allowed:
        raise InvalidInput(
            f"{path!r} is not under a folder this service was configured to read", reason="PATH_NOT_ALLOWED"
        )
    if not files:
        raise NotFound(f"there is no text file {path!r}", reason="TEXT_FILE_NOT_FOUND")
    if files[0].suffix not in SUFFIXES:
        raise InvalidInput(f"{path!r} is neither .txt nor .jsonl", reason="BAD_TEXT_FILE")
    return files[0]
