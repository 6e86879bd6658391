"""What the measuring processes of `neap tune` and `neap evaluate` have in common."""

import json
import sys

import torch

from shared.ladder.artefact import unpack_ladder
from shared.ladder.ladder import Ladder
from shared.model.load import LoadedModel
from shared.registry.base import PublishedVersion
from shared.registry.factory import open_registry


def published_router(registry: str, model_id: str, router: str) -> tuple[PublishedVersion, Ladder]:
    """A router by version number or alias. Raises as `open_registry`, `Registry.get`, `Registry.resolve` and `unpack_ladder`."""
    opened = open_registry(registry)
    try:
        by_number = router.isdecimal()
        published = (
            opened.get(model_id, int(router)) if by_number else opened.resolve(model_id, router)
        )
        blobs = {name: opened.read_blob(published, name) for name in published.manifest["blobs"]}
    finally:
        opened.close()
    return published, unpack_ladder(published.manifest, blobs)


def describe_machine(loaded: LoadedModel) -> str:
    """What speeds depend on: those of two machines must not be compared."""
    return f"{loaded.device.type}, {loaded.model.dtype}, {torch.get_num_threads()} threads"


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()
