"""What a registry answers: versions, aliases, canaries and events. Digests are "sha256:<64 hex>"."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PublishedVersion:
    """One immutable version of a model's router. `manifest` is the parsed manifest, `create_time_s` Unix seconds.

    `damage` is empty for an intact version. Otherwise it describes what is wrong with the stored manifest, and
    `manifest` is empty.
    """

    model_id: str
    version: int
    manifest_digest: str
    create_time_s: float
    size_bytes: int
    manifest: Mapping[str, Any]
    damage: str = ""


@dataclass(frozen=True)
class Canary:
    """A second version, to which an alias gives `share_per_mille` (1 to 999) of its requests."""

    version: int
    share_per_mille: int


@dataclass(frozen=True)
class AliasChange:
    """One entry of an alias' history: its version before and after the change, and its canary after the change.

    `from_version` is None for the first change. It equals `to_version` if only the canary changed.
    """

    model_id: str
    alias: str
    from_version: int | None
    to_version: int
    actor: str
    reason: str
    change_time_s: float
    canary: Canary | None = None


@dataclass(frozen=True)
class AliasTarget:
    """The version and canary that an alias names now.
    `inference_service.resolutions` decides which requests the canary gets."""

    published: PublishedVersion
    canary: Canary | None = None


@dataclass(frozen=True)
class RegistryEvent:
    """A publication or an alias change. `event` increases within a model, not necessarily by one."""

    event: int
    change: PublishedVersion | AliasChange
