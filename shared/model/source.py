"""Where the files of a model are: a folder, a .gguf file, or a name on the Hugging Face Hub."""

from pathlib import Path
from typing import Any

import structlog
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from shared.errors import NeapError, NotFound, PermissionDenied, Unavailable
from shared.model.weights.files import parts_of

log = structlog.get_logger("neap.model")


def arguments_of(source: str | Path) -> dict[str, Any]:
    """The arguments by which transformers finds the model.

    Raises `NotFound` (reason MODEL_NOT_FOUND); for a name on the hub also `PermissionDenied` (MODEL_GATED) and
    `Unavailable` (HUB_UNAVAILABLE).
    """
    path = Path(source)
    # Code that comes with a model is never run. If this were not set, transformers would ask on standard input.
    arguments: dict[str, Any] = {"pretrained_model_name_or_path": str(source), "trust_remote_code": False}
    if path.suffix == ".gguf":
        for part in parts_of(path):
            if not part.is_file():
                raise missing_model(source, "there is no such file" if part == path else f"it has no part {part.name}")
        # The first part has the metadata.
        return arguments | {"pretrained_model_name_or_path": str(path.parent), "gguf_file": parts_of(path)[0].name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise missing_model(source, "the folder has no config.json")
        return arguments
    if path.exists():
        raise missing_model(source, "a model is a folder or a .gguf file")
    if path.is_absolute() or str(source).startswith("."):
        raise missing_model(source, "there is no such folder")
    return arguments | {"local_files_only": _is_only_cached(str(source))}


def check_files(source: str | Path) -> None:
    """Whether a folder or a file can be a model, as far as a look tells. Does not ask the hub.
    Raises `NotFound` (reason MODEL_NOT_FOUND)."""
    path = Path(source)
    if path.suffix == ".gguf" or path.exists() or path.is_absolute() or str(source).startswith("."):
        arguments_of(source)


def size_mb(path: Path) -> float | None:
    """Size of the weights on disk, in MB. None if they are on the hub or in its cache."""
    if path.is_file():
        return round(sum(part.stat().st_size for part in parts_of(path) if part.is_file()) / 1e6, 1)
    files = [*path.glob("*.safetensors")] if path.is_dir() else []
    return round(sum(file.stat().st_size for file in files) / 1e6, 1) if files else None


def missing_model(source: str | Path, why: str) -> NotFound:
    return NotFound(
        f"model {str(source)!r} cannot be loaded: {why}", reason="MODEL_NOT_FOUND", metadata={"source": str(source)}
    )


def _is_only_cached(name: str) -> bool:
    """Whether the hub does not give the model now, but its cache on this machine has it.

    The hub is asked once: transformers would repeat the question for half a minute, for each of the model's files.
    """
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (OSError, HTTP_ERROR, EntryNotFoundError, HFValidationError) as error:
        if isinstance(error, HFValidationError) or not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise _problem_of(name, error) from error
        log.info(
            "the model is read from the hub's cache: the hub does not give it now",
            source=name,
            error=type(error).__name__,
        )
        return True
    return False


def _problem_of(name: str, error: Exception) -> NeapError:
    if isinstance(error, GatedRepoError):
        return PermissionDenied(
            f"model {name!r} is gated: its owner on the Hugging Face Hub must admit the account of this machine's "
            "token",
            reason="MODEL_GATED",
            metadata={"source": name},
        )
    if isinstance(error, HFValidationError):
        return missing_model(name, "there is no such folder, and it is no name of the Hugging Face Hub")
    if isinstance(error, RepositoryNotFoundError):
        return missing_model(
            name,
            "there is no such folder, and the Hugging Face Hub has no such model that this machine's token may read",
        )
    if isinstance(error, EntryNotFoundError):
        return missing_model(name, "it has no config.json on the Hugging Face Hub")
    if isinstance(error, OfflineModeIsEnabled):
        return missing_model(
            name,
            "there is no such folder, the Hugging Face Hub's cache on this machine does not have it, and "
            "HF_HUB_OFFLINE forbids to ask the hub",
        )
    return Unavailable(
        f"model {name!r} cannot be loaded: there is no such folder, the Hugging Face Hub's cache on this machine does "
        f"not have it, and {constants.ENDPOINT} cannot be reached or answers with an error",
        reason="HUB_UNAVAILABLE",
        metadata={"source": name},
    )


# The base of all errors of huggingface_hub's HTTP library. Its module differs between versions of huggingface_hub.
HTTP_ERROR: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
