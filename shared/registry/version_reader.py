"""From the index' record of a version to the version with its manifest, also where that is damaged; alike for every backend."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from shared.errors import Corrupt, NeapError
from shared.registry.base import PublishedVersion
from shared.registry.contents import check_passed
from shared.registry.journal import VersionRecord


class VersionReader(ABC):
    """`damages`: errors of reading one manifest that concern its version alone. All others concern the whole store."""

    damages: ClassVar[tuple[type[NeapError], ...]] = (Corrupt,)

    @abstractmethod
    def _read_manifest(self, digest: str, *, is_fresh: bool) -> bytes:
        """Digest checked. `is_fresh`: from where it is stored, whatever is kept in memory. Raises Corrupt, Unavailable."""

    @abstractmethod
    def _find_record(self, model_id: str, version: int) -> VersionRecord:
        """Raises NotFound, Corrupt."""

    def get(self, model_id: str, version: int) -> PublishedVersion:
        """See `Registry.get`."""
        return self._version(model_id, self._find_record(model_id, version))

    def _version(
        self, model_id: str, record: VersionRecord, *, is_fresh: bool = False
    ) -> PublishedVersion:
        manifest = json.loads(self._read_manifest(record.manifest_digest, is_fresh=is_fresh))
        return version_of(model_id, record, manifest)

    def _listed(self, model_id: str, record: VersionRecord) -> PublishedVersion:
        """Where the manifest is damaged, without it and with `damage`."""
        try:
            return self._version(model_id, record)
        except self.damages as error:
            return version_of(model_id, record, {}, damage=error.message)

    def _check_sound(self, model_id: str, version: int, *, must_pass: bool) -> None:
        """Before an alias names it. Raises NotFound, Corrupt (VERSION_DAMAGED), PreconditionFailed (CHECKS_FAILED, where it
        `must_pass` the checks that it records)."""
        record = self._find_record(model_id, version)
        try:
            manifest = self._version(model_id, record, is_fresh=True).manifest
        except Corrupt as error:
            raise version_damaged(model_id, version, error) from error
        if must_pass:
            check_passed(manifest, f"version {version} of {model_id!r}")


def version_of(
    model_id: str, record: VersionRecord, manifest: Mapping[str, Any], *, damage: str = ""
) -> PublishedVersion:
    return PublishedVersion(
        model_id,
        record.version,
        record.manifest_digest,
        record.create_time_s,
        record.size_bytes,
        manifest,
        damage,
    )


def version_damaged(model_id: str, version: int, error: Corrupt) -> Corrupt:
    """Why no alias may name `version`. `error`: what reading it raised."""
    return Corrupt(
        f"version {version} of {model_id!r} is damaged, so no alias may name it: {error.message}."
        " Name another version, or publish the same contents again",
        reason="VERSION_DAMAGED",
        metadata={**error.metadata, "model_id": model_id, "version": str(version)},
    )
