"""The work of a job: load the model, calibrate, pack. Runs in the job's process; the only place that imports torch."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from calibrator_service.job_spec import HubDataset, JobSpec, ProgressReport
from calibrator_service.process_config import ModelOptions
from shared.cpus import usable_cpus
from shared.errors import Cancelled


@dataclass(frozen=True)
class Task:
    """`work_dir` outlives the process: a resumed job finds there what it had. `progress` and `should_stop` are cheap.
    `public_only`: a dataset of the hub is read without this machine's token."""

    source: str
    spec: JobSpec
    options: ModelOptions
    work_dir: Path
    progress: Callable[[ProgressReport], None]
    should_stop: Callable[[], bool]
    public_only: bool = False


@dataclass(frozen=True)
class Product:
    """What to publish: a manifest without "blobs", and blobs by name."""

    manifest: Mapping[str, Any]
    blobs: Mapping[str, bytes]


def run(task: Task) -> Product:
    """Raises NeapError: NotFound and UnsupportedModel from loading, Cancelled, whatever calibration raises on purpose."""
    # Imported here, so that tests of the process around it need no torch.
    import torch

    from calibrator_service.calibration import spec as calibration
    from calibrator_service.calibration.pipeline import calibrate
    from shared.ladder.artefact import pack_ladder
    from shared.ladder.checks import check_packed
    from shared.model.load import load_model

    options = task.options
    torch.set_num_threads(options.threads or min(torch.get_num_threads(), usable_cpus()))
    loaded = load_model(
        task.source,
        model_id=task.spec.model_id,
        dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
        device=options.device,
        context_length=options.context_length,
    )
    if task.should_stop():
        raise Cancelled("the calibration was cancelled while its model was loading")
    source = task.spec.source
    kind = getattr(calibration, type(source).__name__)
    values = {field.name: getattr(task.spec, field.name) for field in fields(task.spec)}
    of_task = {"public_only": task.public_only} if isinstance(source, HubDataset) else {}
    values["source"] = kind(**asdict(source), **of_task)
    result = calibrate(
        loaded,
        calibration.CalibrationSpec(**values),
        work_dir=task.work_dir,
        progress=task.progress,
        should_stop=task.should_stop,
    )
    manifest, blobs = pack_ladder(result.ladder, result.report)
    return Product({**manifest, "checks": check_packed(manifest, blobs)}, blobs)
