"""The interface of every registry backend. Contents are content-addressed and immutable; only aliases change.

A publication stores and reads back the blobs, then the manifest, and then adds one entry atomically, so a reader never sees an
incomplete router. All methods block. All are safe to call from several threads and processes. Digests are "sha256:<64 hex>".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class PublishedVersion:
    """One immutable version of a model's router. `manifest` is the parsed manifest, `create_time_s` Unix seconds.

    `damage` is empty for an intact version. Otherwise it describes what is wrong with the stored manifest, and `manifest` is empty.
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
    """The version and canary that an alias names now. `shared.registry.split` decides which requests the canary gets."""

    published: PublishedVersion
    canary: Canary | None = None


@dataclass(frozen=True)
class RegistryEvent:
    """A publication or an alias change. `event` increases within a model, not necessarily by one."""

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
        """Publish `blobs` (name -> bytes) with `manifest`, to which the registry adds {"blobs": {name: {"digest", "size_bytes"}}}.

        Idempotent by `request_id`: a repeated id returns the version it created, or raises AlreadyExists if the contents differ.
        Raises InvalidInput (names, sizes), Exhausted (disk full; nothing visible is left behind), Corrupt (reading back failed),
        PreconditionFailed (CHECKS_FAILED: there are aliases to set, and the manifest records a failed check).
        """

    def find_publication(self, model_id: str, request_id: str) -> PublishedVersion | None:
        """Return the version that `publish` made for `request_id`, None if it made none. A damaged version has `damage` set."""

    def get(self, model_id: str, version: int) -> PublishedVersion:
        """Return one version. Raises NotFound, Corrupt (its manifest is damaged)."""

    def resolve(self, model_id: str, alias: str) -> PublishedVersion:
        """Return the version that an alias names, ignoring its canary. Raises NotFound, which lists the aliases, and Corrupt."""

    def target(self, model_id: str, alias: str) -> AliasTarget:
        """Return the alias' version and canary, read atomically. A damaged version has `damage` set. Raises NotFound."""

    def list_versions(
        self, model_id: str, *, before: int | None = None, limit: int = 100
    ) -> list[PublishedVersion]:
        """List versions, newest first, only those below `before`. Damaged versions have `damage` set. Empty for an unknown model."""

    def read_blob(self, version: PublishedVersion, name: str) -> bytes:
        """Return a blob. Its digest is checked at every read. Raises NotFound, Corrupt."""

    def aliases(self, model_id: str) -> dict[str, int]:
        """Return alias -> version."""

    def canaries(self, model_id: str) -> dict[str, Canary]:
        """Return alias -> canary for the aliases that have one."""

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
        """Point an alias at a version, which ends its canary.

        With `expected_version` this is a compare-and-swap; 0 means that the alias must not exist. Raises NotFound, Conflict, Corrupt
        (VERSION_DAMAGED), PreconditionFailed (CHECKS_FAILED: the version records a failed check).
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
        """Begin or change a canary. None ends it, so that all requests get the alias' version again.

        `expected_version` is compared with the alias' version. Raises InvalidInput (BAD_SHARE; BAD_CANARY: the alias already names
        that version), NotFound, Conflict, Corrupt (VERSION_DAMAGED), PreconditionFailed (CHECKS_FAILED; NO_CANARY: there is no
        canary to end).
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
        """Point an alias at the version of its canary and end the canary.

        Raises NotFound, PreconditionFailed (NO_CANARY), Conflict (CANARY_MOVED), Corrupt (VERSION_DAMAGED).
        """

    def rollback_alias(
        self,
        model_id: str,
        alias: str,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """Undo the last change: end the canary or, if there is none, return to the previous version, even if its checks failed.

        Raises NotFound, Conflict, PreconditionFailed if there is no previous version, Corrupt (VERSION_DAMAGED) if it cannot be read.
        """

    def alias_history(self, model_id: str, alias: str) -> list[AliasChange]:
        """Return the alias' changes, newest first. Raises NotFound."""

    def events(
        self, model_id: str, *, after_event: int = 0, timeout_s: float = 0.0
    ) -> Iterator[RegistryEvent]:
        """Iterate over the events after `after_event`. If there is none yet, wait for the first for up to `timeout_s`.

        Publications of versions that have been damaged since have `damage` set.
        """

    def last_event(self, model_id: str) -> int:
        """Return the number of the newest event, 0 if there is none."""

    def check_writable(self) -> None:
        """Write a probe where publications are written, and remove it. Raises what a publication would raise."""

    def close(self) -> None:
        """Release files and connections."""
