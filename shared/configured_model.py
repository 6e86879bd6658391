"""Models, loaded as the settings of a service say."""

from typing import Any

import torch

from shared.config import ModelSource, ServiceSettings, WorkerSettings
from shared.model.load import load_model
from shared.model.loaded import LoadedModel


def load_configured(source: ModelSource, settings: ServiceSettings) -> LoadedModel:
    """The model as a service with these settings loads it. Raises as `load_model`."""
    return load_model(source.source, model_id=source.model_id, **load_options(settings))


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
    return options


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a setting; None for "auto"."""
    return None if name == "auto" else getattr(torch, name)
