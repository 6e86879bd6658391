"""The work of a job: loads the model, calibrates, packs the ladder.
Runs in the job's process and imports torch only when called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrator_service.calibration.progress import Progress
from calibrator_service.process_config import ProcessConfig
from shared.cpus import usable_cpus
from shared.errors import Cancelled


@dataclass(frozen=True)
class Product:
    """What to publish: a manifest without "blobs", and the blobs by name."""

    manifest: Mapping[str, Any]
    blobs: Mapping[str, bytes]


def run(
    config: ProcessConfig,
    parent_statistics: Path | None,
    progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
) -> Product:
    """`parent_statistics`: the file of the spec's parent, if it has one.
    `progress` and `should_stop` are cheap to call.

    Raises NeapError: NotFound and UnsupportedModel from loading, Cancelled, and the errors of `calibrate`.
    """
    # Imported here, so that the service and the tests of a job's process need no torch.
    import torch

    from calibrator_service.calibration.parent import Parent
    from calibrator_service.calibration.pipeline import calibrate
    from calibrator_service.fleet import fleet_of
    from shared.configured_model import load_configured
    from shared.ladder.checks import check_artefact

    spec, settings = config.spec, config.settings
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), usable_cpus()))
    loaded = load_configured(settings.sources[spec.model_id], settings)
    if should_stop():
        raise Cancelled("the calibration was cancelled while its model was loading")
    parent = None
    if spec.parent is not None and parent_statistics is not None:
        parent = Parent.read(parent_statistics, spec.parent)
    # A service that is configured without workers since the job was created writes itself.
    by_workers = spec.uses_workers and settings.text_workers
    result = calibrate(
        loaded,
        spec,
        parent=parent,
        work_dir=config.work_dir,
        progress=progress,
        should_stop=should_stop,
        fleet_of=fleet_of(settings.text_workers, loaded) if by_workers else None,
    )
    manifest, blobs = result.pack()
    return Product({**manifest, "checks": check_artefact(manifest, blobs)}, blobs)
