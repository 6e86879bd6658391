"""What the measuring processes of `neap tune` and `neap evaluate` have in common."""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from shared.config import make_settings
from shared.configured_model import load_configured, load_options
from shared.cpus import usable_cpus
from shared.errors import InvalidInput, NeapError
from shared.ladder.artefact import unpack_ladder
from shared.ladder.blob_names import served_blobs
from shared.ladder.ladder import Ladder
from shared.model.loaded import LoadedModel
from shared.registry.base import PublishedVersion
from shared.registry.factory import open_registry
from shared.rpc.logs import configure_logging
from shared.service_settings import ModelSource, WorkerSettings


@dataclass(frozen=True)
class Subject:
    """A model as a worker would load it, and a published router for it.
    `source` and `load_options`: to load the model again."""

    source: str
    load_options: dict[str, Any]
    loaded: LoadedModel
    published: PublishedVersion
    ladder: Ladder


def run_process(measure: Callable[[], None]) -> int:
    """Runs `measure` and says its error. Returns the process' exit status: 0, 1 for a `NeapError`, 130 if it was
    interrupted."""
    configure_logging("warning")
    try:
        measure()
    except NeapError as error:
        say(error=error.message, reason=error.reason)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def load_subject(model: str, router: str) -> Subject:
    """`model`: ID=SOURCE; `router`: a version number or an alias.
    Everything else is a setting of the worker, read from the environment.

    Sets the number of threads. Raises `NeapError`.
    """
    settings = make_settings(WorkerSettings)
    try:
        source = ModelSource.parse(model)
    except ValueError as error:
        raise InvalidInput(str(error), reason="BAD_CONFIGURATION") from error
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), usable_cpus()))
    published, ladder = published_router(settings.registry, source.model_id, router)
    loaded = load_configured(source, settings)
    ladder.check_model(loaded)
    return Subject(source.source, load_options(settings), loaded, published, ladder)


def published_router(registry: str, model_id: str, router: str) -> tuple[PublishedVersion, Ladder]:
    """A router by version number or alias. Raises as `open_registry`, `Registry.get`, `Registry.resolve` and
    `unpack_ladder`."""
    with closing(open_registry(registry)) as opened:
        by_number = router.isdecimal()
        published = opened.get(model_id, int(router)) if by_number else opened.resolve(model_id, router)
        names = served_blobs(published.manifest["blobs"])
        blobs = {name: opened.read_blob(published, name) for name in names}
    return published, unpack_ladder(published.manifest, blobs)


def describe_machine(loaded: LoadedModel) -> str:
    """What speeds depend on: those of two machines must not be compared."""
    dtypes = [str(loaded.model.dtype)]
    if loaded.compute_dtype != loaded.model.dtype:
        dtypes.append(f"products in {loaded.compute_dtype}")
    if loaded.kv_dtype != loaded.model.dtype:
        dtypes.append(f"keys and values in {loaded.kv_dtype}")
    return f"{loaded.device.type}, {', '.join(dtypes)}, {torch.get_num_threads()} threads"


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
