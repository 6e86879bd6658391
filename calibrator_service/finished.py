"""Keeps a finished product on disk, so that a job that is killed while it publishes later publishes the same bytes."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from calibrator_service.recipe import Product
from shared.files import sync_folder, write_synced
from shared.registry.encoding import canonical_json

_FOLDER = "finished"
_RECORD = "product.json"


def save_product(work_dir: Path, product: Product) -> None:
    """Writes the whole product or nothing. Raises InvalidInput for a manifest that JSON cannot hold, OSError."""
    partial = work_dir / f"{_FOLDER}.part"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    names = sorted(product.blobs)
    for number, name in enumerate(names):
        write_synced(partial / f"{number}.bin", product.blobs[name])
    # Parsed again, so that the manifest that is published later has exactly the types that JSON keeps.
    record = {
        "manifest": json.loads(canonical_json(product.manifest)),
        "blobs": [[name, _digest(product.blobs[name])] for name in names],
    }
    write_synced(partial / _RECORD, json.dumps(record).encode())
    sync_folder(partial)
    shutil.rmtree(work_dir / _FOLDER, ignore_errors=True)
    partial.rename(work_dir / _FOLDER)
    sync_folder(work_dir)


def load_product(work_dir: Path) -> Product | None:
    """The saved product. None if there is none or it is damaged: the job then makes it again."""
    folder = work_dir / _FOLDER
    try:
        record = json.loads((folder / _RECORD).read_bytes())
        blobs: Mapping[str, bytes] = {
            name: (folder / f"{number}.bin").read_bytes() for number, (name, _) in enumerate(record["blobs"])
        }
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if any(_digest(blobs[name]) != digest for name, digest in record["blobs"]):
        return None
    return Product(record["manifest"], blobs)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
