"""Which Hugging Face Hub datasets a calibration may read. The checks need neither a network nor torch."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from shared.errors import InvalidInput

ANY = "*"
MAX_NAME_CHARACTERS = 256
# Names of splits that `datasets` accepts. A slice of a split ("train[:10%]") cannot be streamed.
_SPLIT = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


def check_hub_dataset(name: str, *, config: str = "", split: str = "", field: str = "") -> None:
    """Refuses a name that is not a dataset of the Hub: a path, a URL, the name of a reader of `datasets` ("text",
    "json", ..).

    A name is "owner/name" or a plain name, in the Hub's alphabet. Empty `config`, `split` and `field` mean the
    defaults. Raises InvalidInput (BAD_DATASET_NAME, BAD_DATASET_CONFIG, BAD_DATASET_SPLIT, BAD_DATASET_FIELD).
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise _bad_name(name, "not a name of the Hugging Face Hub, as owner/name") from error
    if not name or any(not part.strip("._") for part in name.split("/")):
        raise _bad_name(name, "not a name of the Hugging Face Hub, as owner/name")
    if "/" not in name and name in _packaged_readers():
        raise _bad_name(name, "the name of a file reader, not of a dataset of the Hub")
    for label, value in (("config", config), ("field", field)):
        if len(value) > MAX_NAME_CHARACTERS or not value.isprintable():
            raise InvalidInput(
                f"{label} must be at most {MAX_NAME_CHARACTERS} printable characters",
                reason=f"BAD_DATASET_{label.upper()}",
            )
    if split and (len(split) > MAX_NAME_CHARACTERS or not _SPLIT.fullmatch(split)):
        raise InvalidInput(
            f"{_shown(split)} is not the name of a split: letters, digits, _ and dots between them; "
            "slices are not supported",
            reason="BAD_DATASET_SPLIT",
        )


def check_allowed(name: str, patterns: Sequence[str]) -> None:
    """Raises InvalidInput (DATASET_NOT_ALLOWED) for a name that matches none of `patterns`, e.g. "owner/*"."""
    if any(fnmatchcase(name, pattern) for pattern in patterns):
        return
    raise InvalidInput(
        f"this service was not configured to read the dataset {_shown(name)} (--hub-dataset)",
        reason="DATASET_NOT_ALLOWED",
    )


def is_public_only(name: str, patterns: Sequence[str]) -> bool:
    """Whether only the pattern "*" allows the name.
    Then any caller may choose it, so the operator's token must not be used."""
    return not any(pattern != ANY and fnmatchcase(name, pattern) for pattern in patterns)


def _packaged_readers() -> frozenset[str]:
    # Imported here: it takes about a second, and names without an owner are rare.
    from datasets import packaged_modules

    return frozenset(packaged_modules._PACKAGED_DATASETS_MODULES)


def _bad_name(name: str, why: str) -> InvalidInput:
    return InvalidInput(f"the dataset {_shown(name)} is {why}", reason="BAD_DATASET_NAME")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "…")
