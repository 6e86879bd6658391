"""The work of a job: loads the model, calibrates, packs the ladder.
Runs in the job's process and imports torch only when called.

The finished product is kept on disk, so that a job that is killed while it publishes later publishes the same bytes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrator_service.calibration.spec import CalibrationSpec, Progress
from calibrator_service.learning.pools import pool_of_source
from calibrator_service.lineage import ParentFiles
from shared.calibrator_settings import CalibratorSettings
from shared.cpus import usable_cpus
from shared.errors import Cancelled
from shared.files import sync_folder, write_synced
from shared.light_imports import import_transformers_lightly
from shared.memory import without_collection
from shared.registry.encoding import canonical_json

if TYPE_CHECKING:
    from calibrator_service.calibration.ranks import Ranks


@dataclass(frozen=True)
class Product:
    """What to publish: a manifest without "blobs", and the blobs by name."""

    manifest: Mapping[str, Any]
    blobs: Mapping[str, bytes]


def run(
    spec: CalibrationSpec,
    settings: CalibratorSettings,
    work_dir: Path,
    parent_files: ParentFiles | None,
    progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    ranks: "Ranks | None" = None,
) -> Product | None:
    """`parent_files`: those of the spec's parent, if it has one.
    `progress` and `should_stop` are cheap to call. The first of several `ranks` alone returns the product.

    Raises NeapError: NotFound and UnsupportedModel from loading, Cancelled, and the errors of `calibrate`.
    """
    with without_collection():
        # Imported here, so that the service and the tests of a job's process need no torch.
        import_transformers_lightly()
        import torch

        from calibrator_service.calibration.pipeline import calibrate_together
        from calibrator_service.calibration.ranks import Ranks
        from calibrator_service.calibration.statistics import Parent
        from calibrator_service.fleet import fleet_of
        from shared.configured_model import load_configured
        from shared.ladder.checks import check_artefact

        # Ranks of one machine share its processors, and have a card each.
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        by_default = usable_cpus() if local_ranks > 1 else min(torch.get_num_threads(), usable_cpus())
        torch.set_num_threads(max(1, (settings.threads or by_default) // local_ranks))
        if torch.cuda.is_available() and local_ranks > 1:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        loaded = load_configured(settings.sources[spec.model_id], settings)
    if should_stop():
        raise Cancelled("the calibration was cancelled while its model was loading")
    parent = None
    if spec.parent is not None and parent_files is not None:
        if parent_files.heads is not None:
            parent = Parent.with_heads(parent_files.statistics, parent_files.heads, spec.parent, loaded)
        elif parent_files.statistics is not None:
            parent = Parent.read(parent_files.statistics, spec.parent)
    # A service that is configured without workers since the job was created writes itself.
    by_workers = spec.uses_workers and settings.text_workers
    result = calibrate_together(
        loaded,
        spec,
        ranks or Ranks(),
        parent=parent,
        work_dir=work_dir,
        progress=progress,
        should_stop=should_stop,
        fleet_of=fleet_of(settings.text_workers, loaded) if by_workers else None,
    )
    if result is None:
        return None
    manifest, blobs = result.pack()
    owner = {"pool": pool} if (pool := pool_of_source(spec.source)) else {}
    return Product({**manifest, **owner, "checks": check_artefact(manifest, blobs)}, blobs)


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
