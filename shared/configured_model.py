"""Models, loaded as the settings of a service say."""

from typing import TYPE_CHECKING, Any

import torch

from shared import ops
from shared.errors import PreconditionFailed
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.remembered.store import StartStore
from shared.service_settings import ModelSource, ServiceSettings
from shared.worker_settings import WorkerSettings

if TYPE_CHECKING:
    from shared.model.ranks.group import Ranks


def load_configured(source: ModelSource, settings: ServiceSettings, ranks: "Ranks | None" = None) -> LoadedModel:
    """The model as a service with these settings loads it, on a worker's `cpu_path`, shared out to `ranks`.

    Raises as `load_model`, and `PreconditionFailed` (reason CPU_PATH_MISSING) if this machine does not have that path.
    """
    if isinstance(settings, WorkerSettings) and settings.cpu_path != "auto":
        use_cpu_path(settings.cpu_path)
    options = load_options(settings)
    if isinstance(settings, WorkerSettings) and settings.start_cache_mb:
        options["store"] = StartStore(settings.data_dir / "start-cache", settings.start_cache_mb << 20)
    return load_model(source.source, model_id=source.model_id, ranks=ranks, **options)


def use_cpu_path(name: str) -> None:
    """Makes the CPU kernels of the whole process those of one instruction set.
    Raises `PreconditionFailed` (reason CPU_PATH_MISSING)."""
    try:
        ops.set_cpu_isa(name)
    except RuntimeError as error:
        raise PreconditionFailed(
            f"this machine or build has no CPU kernels {name}; it would use {ops.cpu_isa()}",
            reason="CPU_PATH_MISSING",
            metadata={"cpu_path": name},
        ) from error


def load_options(settings: ServiceSettings) -> dict[str, Any]:
    """Arguments of `load_model`, all but the source and the model's ID."""
    options: dict[str, Any] = {
        "dtype": dtype_named(settings.dtype),
        "compute_dtype": dtype_named(settings.compute_dtype),
        "device": settings.device,
        "context_length": settings.context_length,
    }
    if isinstance(settings, WorkerSettings):
        options["kv_dtype"] = dtype_named(settings.kv_dtype)
        options["invariant"] = settings.require_exact
    return options


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a setting; None for "auto"."""
    return None if name == "auto" else getattr(torch, name)
