"""Reads and writes a ladder's artefact as a folder of manifest.json and its blobs: a router shipped as files, as in
bench/router."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.digests import digest_of
from shared.errors import Corrupt, NotFound
from shared.ladder.artefact import BLOB, unpack_ladder
from shared.ladder.blob_names import (
    HEADS_BLOB,
    MANIFEST,
    OPTIONAL_BLOBS,
    SIGNATURE_BLOB,
    STATISTICS_BLOB,
    blob_entry,
    manifest_file,
)
from shared.ladder.ladder import Ladder


def write_router_folder(folder: Path, manifest: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
    """Writes what `pack_ladder` returned, and the digests of the blobs. Creates the folder if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in blobs.items():
        (folder / name).write_bytes(data)
    entries = {name: blob_entry(data) for name, data in blobs.items()}
    (folder / MANIFEST).write_bytes(manifest_file(manifest, entries))


def read_router_folder(folder: Path, *, complete: bool = False) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(manifest, blobs) as `unpack_ladder` takes them. `complete`: also the statistics and the signature, if the folder
    has them. Other files are ignored. The manifest's record of its blobs is compared with them, and left out.

    Raises `NotFound` without a manifest, and `Corrupt` if the manifest is no JSON object, the ladder's blob is missing,
    or the files are not those that the manifest names.
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
    if not (folder / BLOB).is_file():
        raise Corrupt(f"{folder} is incomplete: {BLOB} is missing")
    heads = [HEADS_BLOB] if manifest.get("heads") == HEADS_BLOB and (folder / HEADS_BLOB).is_file() else []
    names = [BLOB, *heads, *(name for name in OPTIONAL_BLOBS if complete and (folder / name).is_file())]
    blobs = {name: (folder / name).read_bytes() for name in names}
    if STATISTICS_BLOB in blobs and digest_of(blobs[STATISTICS_BLOB]) != statistics_record(manifest).get("digest"):
        raise Corrupt(f"{folder / STATISTICS_BLOB} is damaged, or belongs to another router")
    recorded = manifest.pop("blobs", None)
    if recorded is not None and not _are_recorded(blobs, recorded):
        raise Corrupt(f"{folder} does not have the files that its manifest names")
    return manifest, blobs


def _are_recorded(blobs: Mapping[str, bytes], recorded: Any) -> bool:
    """A router may be copied without the files that it may lack. A folder's manifest does not name the signature, a
    registry's does."""
    if not isinstance(recorded, dict) or {*recorded} - {*OPTIONAL_BLOBS} != {*blobs} - {*OPTIONAL_BLOBS}:
        return False
    checked = [name for name in blobs if name != SIGNATURE_BLOB or name in recorded]
    return all(recorded.get(name) == blob_entry(blobs[name]) for name in checked)


def statistics_record(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a manifest says about its router's statistics; empty if it says nothing."""
    calibration: Any = manifest.get("calibration")
    record: Any = calibration.get("statistics") if isinstance(calibration, Mapping) else None
    return record if isinstance(record, Mapping) else {}


def read_ladder(folder: Path | str) -> Ladder:
    """The ladder in `folder`. Raises as `read_router_folder` and `unpack_ladder`."""
    return unpack_ladder(*read_router_folder(Path(folder)))
