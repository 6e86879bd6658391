"""The files of a router that travel, and what they may weigh. Free of torch."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shared.errors import Corrupt, NotFound, PreconditionFailed
from shared.ladder.blob_names import (
    HEADS_BLOB,
    LADDER_BLOB,
    MANIFEST,
    MAX_BLOB_BYTES,
    SIGNATURE_BLOB,
    STATISTICS_BLOB,
)
from shared.registry.contents import MAX_MANIFEST_BYTES

CARD, PICTURE = "README.md", "acceptance.png"
# What is fetched, and the most bytes of it. Statistics: as `calibrator_service.lineage` reads.
MAX_BYTES: Mapping[str, int] = {
    MANIFEST: MAX_MANIFEST_BYTES,
    LADDER_BLOB: MAX_BLOB_BYTES,
    HEADS_BLOB: MAX_BLOB_BYTES,
    STATISTICS_BLOB: 1 << 30,
    SIGNATURE_BLOB: 1 << 18,
}


def wanted(sizes: Mapping[str, int | None], place: object) -> list[str]:
    """The files to fetch of those that are there. Other files, cards and pictures too, stay where they are.

    Raises NotFound (ROUTER_NOT_FOUND) and Corrupt (ROUTER_TOO_LARGE).
    """
    for name in (MANIFEST, LADDER_BLOB):
        if name not in sizes:
            raise NotFound(f"{place} holds no router: it has no {name}", reason="ROUTER_NOT_FOUND")
    names = [name for name in MAX_BYTES if name in sizes]
    for name in names:
        check_weight(name, sizes[name] or 0, place)
    return names


def check_weight(name: str, size_bytes: int, place: object) -> None:
    """Raises Corrupt (ROUTER_TOO_LARGE)."""
    if size_bytes > MAX_BYTES[name]:
        raise Corrupt(
            f"{name} of {place} has {size_bytes} bytes; at most {MAX_BYTES[name]} are taken",
            reason="ROUTER_TOO_LARGE",
            metadata={"file": name, "size_bytes": str(size_bytes)},
        )


def optional_module(name: str, extra: str) -> Any:
    """A module of an optional dependency. Raises PreconditionFailed (EXTRA_MISSING)."""
    try:
        return import_module(name)
    except ImportError as error:
        raise PreconditionFailed(
            f"{name.partition('.')[0]} is not installed: pip install 'neap-server[{extra}]'",
            reason="EXTRA_MISSING",
            metadata={"extra": extra},
        ) from error
