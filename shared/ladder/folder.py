"""Reads and writes a ladder's artefact as a folder of manifest.json and its blob: a router shipped as files, as in bench/router."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import Corrupt, NotFound
from shared.ladder.artefact import BLOB, unpack_ladder
from shared.ladder.ladder import Ladder

MANIFEST = "manifest.json"


def write_router_folder(
    folder: Path, manifest: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> None:
    """Writes what `pack_ladder` returned. Creates the folder if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in blobs.items():
        (folder / name).write_bytes(data)
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_router_folder(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(manifest, blobs) as `unpack_ladder` takes them. Other files in the folder are ignored.

    Raises `NotFound` without a manifest, and `Corrupt` if the manifest is no JSON object or the blob is missing.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise NotFound(f"{folder} holds no router: {MANIFEST} is missing")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is not JSON") from error
    if not isinstance(manifest, dict):
        raise Corrupt(f"{path} is not a manifest: it is not a JSON object")
    blob = folder / BLOB
    if not blob.is_file():
        raise Corrupt(f"{folder} is incomplete: {BLOB} is missing")
    return manifest, {BLOB: blob.read_bytes()}


def read_ladder(folder: Path | str) -> Ladder:
    """The ladder in `folder`. Raises as `read_router_folder` and `unpack_ladder`."""
    return unpack_ladder(*read_router_folder(Path(folder)))
