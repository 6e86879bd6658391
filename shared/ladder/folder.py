"""Reads and writes a ladder's artefact as a folder of manifest.json and its blobs: a router shipped as files, as in
bench/router."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import Corrupt, NotFound
from shared.ladder.artefact import BLOB, unpack_ladder
from shared.ladder.blob_names import STATISTICS_BLOB
from shared.ladder.ladder import Ladder

MANIFEST = "manifest.json"


def write_router_folder(folder: Path, manifest: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
    """Writes what `pack_ladder` returned. Creates the folder if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in blobs.items():
        (folder / name).write_bytes(data)
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_router_folder(folder: Path, *, with_statistics: bool = False) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(manifest, blobs) as `unpack_ladder` takes them. `with_statistics`: also the statistics, if the folder has them.
    Other files are ignored.

    Raises `NotFound` without a manifest, and `Corrupt` if the manifest is no JSON object, the ladder's blob is missing,
    or the statistics are not those that the manifest names.
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
    blobs = {BLOB: (folder / BLOB).read_bytes()}
    if with_statistics and (folder / STATISTICS_BLOB).is_file():
        blobs[STATISTICS_BLOB] = (folder / STATISTICS_BLOB).read_bytes()
        digest = f"sha256:{hashlib.sha256(blobs[STATISTICS_BLOB]).hexdigest()}"
        if digest != statistics_record(manifest).get("digest"):
            raise Corrupt(f"{folder / STATISTICS_BLOB} is damaged, or belongs to another router")
    return manifest, blobs


def statistics_record(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a manifest says about its router's statistics; empty if it says nothing."""
    calibration: Any = manifest.get("calibration")
    record: Any = calibration.get("statistics") if isinstance(calibration, Mapping) else None
    return record if isinstance(record, Mapping) else {}


def read_ladder(folder: Path | str) -> Ladder:
    """The ladder in `folder`. Raises as `read_router_folder` and `unpack_ladder`."""
    return unpack_ladder(*read_router_folder(Path(folder)))
