"""Streams the text of a Hugging Face Hub dataset. Only files that the Hub stores for the dataset are read.

`datasets.load_dataset` reads a name as a local folder, a URL or a reader if it can, and follows the paths in a
dataset's card. So the Hub's API resolves the name, the card's patterns are matched within the dataset at one commit,
and `load_dataset` gets one fixed reader and the URLs of those files.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename
from typing import Any

from huggingface_hub import DatasetCard, HfApi
from huggingface_hub.errors import DisabledRepoError, GatedRepoError, RepositoryNotFoundError

from calibrator_service.calibration.spec import HubDataset
from calibrator_service.hub_datasets import check_hub_dataset
from shared.errors import InvalidInput, NeapError, NotFound, PermissionDenied, Unavailable
from shared.model.source import HTTP_ERROR

logger = logging.getLogger(__name__)

# Readers of `datasets` that read plain text and follow no references to other files, by file name extension.
READERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "parquet": ("parquet", {}),
    "jsonl": ("json", {}),
    "ndjson": ("json", {}),
    "json": ("json", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"sep": "\t"}),
    "txt": ("text", {"sample_by": "document"}),
    "arrow": ("arrow", {}),
}
# Options of a reader that a card may set.
CARD_OPTIONS: Mapping[str, tuple[str, ...]] = {"csv": ("sep", "delimiter"), "json": ("field",)}
DEFAULT_CONFIG = "default"
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class HubFiles:
    """The files to read: URLs under one commit of the dataset, and the reader of `datasets` for them, with its
    options."""

    reader: str
    options: Mapping[str, str]
    urls: Sequence[str]


def hub_texts(source: HubDataset) -> Iterator[str]:
    """The texts in the source's column, without blank ones.

    Raises `InvalidInput` (BAD_DATASET_*, DATASET_CONFIG_NOT_FOUND, DATASET_SPLIT_NOT_FOUND, DATASET_UNSUPPORTED,
    DATASET_UNREADABLE, FIELD_NOT_FOUND), `NotFound` (DATASET_NOT_FOUND), `PermissionDenied` (DATASET_GATED) and
    `Unavailable` (DATASET_UNAVAILABLE).
    """
    check_hub_dataset(source.name, config=source.config, split=source.split, field=source.field or "text")
    # Imported here: it takes seconds, and most calibrations need no dataset.
    import datasets

    token = False if source.public_only else None
    with _hub_errors(source):
        files = _resolve_files(source, source.split or "train", token)
        rows = datasets.load_dataset(
            files.reader,
            data_files={"train": list(files.urls)},
            split="train",
            streaming=True,
            token=token,
            **files.options,
        )
        # A file may declare a column of images or sounds, which name other files.
        # Without decoding, nothing opens those.
        iterator = iter(rows if rows.features is None else rows.decode(False))
    field = source.field or "text"
    while True:
        with _hub_errors(source):
            row = next(iterator, None)
        if row is None:
            return
        text = row.get(field)
        if not isinstance(text, str):
            raise InvalidInput(f"dataset {source.name!r} has no text in the column {field!r}", reason="FIELD_NOT_FOUND")
        if text.strip():
            yield text


def _resolve_files(source: HubDataset, split: str, token: bool | None) -> HubFiles:
    from datasets import DownloadConfig
    from datasets.data_files import get_data_patterns, resolve_pattern, sanitize_patterns

    api = HfApi(token=token)
    info = api.dataset_info(source.name, timeout=TIMEOUT_S)
    names = {sibling.rfilename for sibling in info.siblings or ()}
    root = f"hf://datasets/{info.id}@{info.sha}"

    def downloaded(name: str) -> Path:
        return Path(api.hf_hub_download(info.id, name, repo_type="dataset", revision=info.sha, token=token))

    card: dict[str, Any] = {}
    data: Any
    if "README.md" in names:
        data = DatasetCard.load(downloaded("README.md")).data
        card |= data.to_dict()
    if ".huggingface.yaml" in names:
        settings = downloaded(".huggingface.yaml").read_text(encoding="utf-8")
        data = DatasetCard(f"---\n{settings}\n---\n").data
        card |= data.to_dict()
    entry = _chosen_config(source, card)
    folder = root
    if data_dir := str(entry.get("data_dir") or ""):
        folder = f"{root}/{_check_path_inside(source, data_dir)}"
    download = DownloadConfig(token=token)
    data_files = (
        sanitize_patterns(entry["data_files"]) if "data_files" in entry else get_data_patterns(folder, download)
    )
    patterns = {str(name): files for name, files in data_files.items()}
    if split not in patterns:
        raise InvalidInput(
            f"dataset {source.name!r} has no split {split!r}; it has: {', '.join(sorted(patterns))}",
            reason="DATASET_SPLIT_NOT_FOUND",
        )
    urls: dict[str, None] = {}
    for pattern in patterns[split]:
        within = _check_path_inside(source, str(pattern))
        with suppress(FileNotFoundError):  # a pattern may match no file
            urls |= dict.fromkeys(resolve_pattern(within, folder, download_config=download))
    if not all(url.startswith(f"{root}/") for url in urls):
        raise _outside_files_error(source)
    return _choose_reader(source, entry, list(urls))


def _chosen_config(source: HubDataset, card: Mapping[str, Any]) -> Mapping[str, Any]:
    """The card's entry for the configuration; empty if the card lists no configurations."""
    listed = card.get("configs")
    configs = {
        str(entry["config_name"]): entry
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, dict) and "config_name" in entry
    }
    if source.config:
        if source.config in configs:
            return configs[source.config]
        if not configs and source.config == DEFAULT_CONFIG:
            return {}
    else:
        defaults = [name for name, entry in configs.items() if entry.get("default")]
        if not configs:
            return {}
        if len(configs) == 1 or defaults or DEFAULT_CONFIG in configs:
            return configs[(*defaults, *(c for c in configs if c == DEFAULT_CONFIG), *configs)[0]]
    names = ", ".join(sorted(configs)) or DEFAULT_CONFIG
    problem = f"no configuration {source.config!r}" if source.config else "several configurations"
    raise InvalidInput(
        f"dataset {source.name!r} has {problem}; name one of: {names}", reason="DATASET_CONFIG_NOT_FOUND"
    )


def _check_path_inside(source: HubDataset, path: str) -> str:
    """A card's path or pattern, checked to stay within the dataset: the author of the card is not trusted."""
    if ":" in path or path.startswith(("/", "~")) or "\\" in path or ".." in path.split("/"):
        raise _outside_files_error(source)
    return path.removeprefix("./").rstrip("/")


def _outside_files_error(source: HubDataset) -> InvalidInput:
    return InvalidInput(
        f"the card of dataset {source.name!r} names files outside the dataset", reason="DATASET_UNSUPPORTED"
    )


def _choose_reader(source: HubDataset, entry: Mapping[str, Any], urls: Sequence[str]) -> HubFiles:
    """The reader that reads the most files, and those files. Archives are ignored."""
    by_reader: dict[tuple[str, str], list[str]] = {}
    for url in urls:
        name = basename(url)
        endings = name.split(".")[1:]
        extension = next((ending for ending in endings if ending in READERS), None)
        if extension is not None and endings[-1] not in ("zip", "tar"):
            by_reader.setdefault((READERS[extension][0], extension), []).append(url)
    if not by_reader:
        raise InvalidInput(
            f"dataset {source.name!r} has no files of these kinds: {', '.join(READERS)}", reason="DATASET_UNSUPPORTED"
        )
    (reader, ending), chosen = max(by_reader.items(), key=lambda item: len(item[1]))
    card_options = {
        option: value for option in CARD_OPTIONS.get(reader, ()) if isinstance(value := entry.get(option), str)
    }
    return HubFiles(reader, {**READERS[ending][1], **card_options}, chosen)


@contextmanager
def _hub_errors(source: HubDataset) -> Iterator[None]:
    """Translates errors of the Hub and the readers to NeapErrors. Their own texts go to the log only."""
    name = source.name
    try:
        yield
    except (NeapError, MemoryError):
        raise
    except Exception as error:
        logger.warning("cannot read dataset %s", name, exc_info=True)
        raise _translated(name, error) from error


def _translated(name: str, error: Exception) -> NeapError:
    if isinstance(error, GatedRepoError):
        return PermissionDenied(
            f"dataset {name!r} is gated: its owner must admit the account of the service's token, and the operator "
            "must allow the dataset by name",
            reason="DATASET_GATED",
        )
    if isinstance(error, RepositoryNotFoundError | DisabledRepoError):
        return NotFound(
            f"there is no dataset {name!r} on the Hub that this service can read", reason="DATASET_NOT_FOUND"
        )
    # EmptyDatasetError of `datasets` is a FileNotFoundError; patterns that match no file raise one, too.
    if isinstance(error, FileNotFoundError) and not isinstance(error, HTTP_ERROR):
        return InvalidInput(f"dataset {name!r} has no data files where its card says", reason="DATASET_UNSUPPORTED")
    if isinstance(error, OSError | HTTP_ERROR | RuntimeError):
        return Unavailable(f"dataset {name!r} cannot be reached", reason="DATASET_UNAVAILABLE")
    return InvalidInput(f"the files of dataset {name!r} cannot be read as text in columns", reason="DATASET_UNREADABLE")
