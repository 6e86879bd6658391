"""What every registry backend promises. Truth is content-addressed and immutable; only aliases move.

Publishing is blobs, read back, manifest, then one atomic entry: a reader never sees half a router. All methods
block; all are safe to call from several threads and several processes. Digests are "sha256:<64 hex>".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class PublishedVersion:
    """One immutable version of a model's router. `manifest` is the parsed manifest, `create_time_s` Unix seconds.

    `damage` is empty for a sound version. Otherwise it says what is wrong with the stored manifest, and `manifest` is empty.
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
    """One entry of an alias' history: where it was and where it has been since, its canary included.

    `from_version` is None for the first; it equals `to_version` where only the canary changed.
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
    """What an alias stands for now. `shared.registry.split` says which requests the canary gets."""

    published: PublishedVersion
    canary: Canary | None = None


@dataclass(frozen=True)
class RegistryEvent:
    """`event` increases within a model, not necessarily by one. `change` says what happened."""

    event: int
    change: PublishedVersion | AliasChange


class Registry(Protocol):
    def publish(
        self,
        model_id: str,
        manifest: Mapping[str, Any],
        blobs: Mapping[str, bytes],
        *,
        request_id: str,
        aliases: Sequence[str] = ("latest",),
        actor: str = "",
    ) -> PublishedVersion:
        """Publish `blobs` (name -> bytes) under `manifest`; the registry adds {"blobs": {name: {"digest", "size_bytes"}}}.

        Idempotent by `request_id`: the same id returns the version it made, with other contents raises AlreadyExists.
        Raises InvalidInput (names, sizes), Exhausted (disk full; nothing visible is left behind), Corrupt (read-back),
        PreconditionFailed (CHECKS_FAILED: aliases are named, and the manifest records a check that did not pass).
        """

    def get(self, model_id: str, version: int) -> PublishedVersion:
        """Raises NotFound, Corrupt (its manifest is damaged)."""

    def resolve(self, model_id: str, alias: str) -> PublishedVersion:
        """The version an alias names now; its canary does not count. Raises NotFound, naming the aliases there are, and Corrupt."""

    def target(self, model_id: str, alias: str) -> AliasTarget:
        """The same with the alias' canary, both as of one moment; a damaged version comes with `damage`."""

    def list_versions(
        self, model_id: str, *, before: int | None = None, limit: int = 100
    ) -> list[PublishedVersion]:
        """Newest first, versions below `before` only; damaged ones with `damage`. Empty for an unknown model."""

    def read_blob(self, version: PublishedVersion, name: str) -> bytes:
        """Digest checked at every read. Raises NotFound, Corrupt."""

    def aliases(self, model_id: str) -> dict[str, int]:
        """Alias -> version."""

    def canaries(self, model_id: str) -> dict[str, Canary]:
        """Of the aliases that have one."""

    def set_alias(
        self,
        model_id: str,
        alias: str,
        version: int,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """Point an alias at a version, which ends its canary. Compare-and-swap when `expected_version` is given (0: must not
        exist yet). Raises NotFound, Conflict, Corrupt (VERSION_DAMAGED), PreconditionFailed (CHECKS_FAILED: the version records a
        check that did not pass).
        """

    def set_canary(
        self,
        model_id: str,
        alias: str,
        canary: Canary | None,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """Begin a canary or change it, or end it (None) so that all requests get the alias' version again.

        `expected_version` is compared with the alias' version. Raises InvalidInput (BAD_SHARE, BAD_CANARY: the alias names that
        version already), NotFound, Conflict, Corrupt (VERSION_DAMAGED), PreconditionFailed (CHECKS_FAILED; NO_CANARY: none is there
        to end).
        """

    def promote_canary(
        self,
        model_id: str,
        alias: str,
        *,
        expected_canary: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """End a canary in favour of its version. Raises NotFound, PreconditionFailed (NO_CANARY), Conflict (CANARY_MOVED), Corrupt
        (VERSION_DAMAGED)."""

    def rollback_alias(
        self,
        model_id: str,
        alias: str,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """Undo: with a canary, end it; without, back to the version named before, whatever its checks say.

        Raises NotFound, Conflict, PreconditionFailed when there is no version to go back to, Corrupt (VERSION_DAMAGED) when that
        version cannot be read.
        """

    def alias_history(self, model_id: str, alias: str) -> list[AliasChange]:
        """Newest first. Raises NotFound."""

    def events(
        self, model_id: str, *, after_event: int = 0, timeout_s: float = 0.0
    ) -> Iterator[RegistryEvent]:
        """Events after `after_event`, waiting up to `timeout_s` for the first when there is none yet. Publications of versions that
        are damaged by now come with `damage`."""

    def last_event(self, model_id: str) -> int:
        """Number of the newest event; 0 when there is none."""

    def close(self) -> None:
        """Release what is held open."""
