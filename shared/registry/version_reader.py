"""Reads versions with their manifests, intact or damaged, from the records of the index. Shared by all backends."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from shared.errors import Corrupt, NeapError
from shared.registry.base import PublishedVersion
from shared.registry.contents import check_passed
from shared.registry.journal import VersionRecord
from shared.registry.names import check_model_id


class VersionReader(ABC):
    """Reads versions. `damages` are the errors that concern only the manifest that was read. Others concern the whole store."""

    damages: ClassVar[tuple[type[NeapError], ...]] = (Corrupt,)

    @abstractmethod
    def _read_manifest(self, digest: str, *, is_fresh: bool) -> bytes:
        """Read a manifest and check its digest. `is_fresh` bypasses caches in memory. Raises Corrupt, Unavailable."""

    @abstractmethod
    def _find_record(self, model_id: str, version: int) -> VersionRecord:
        """Return the record of a version. Raises NotFound, Corrupt."""

    @abstractmethod
    def _version_of_request(self, model_id: str, request_id: str) -> int | None:
        """Return the version that was published for a request."""

    def find_publication(self, model_id: str, request_id: str) -> PublishedVersion | None:
        """See `Registry.find_publication`."""
        version = self._version_of_request(check_model_id(model_id), request_id)
        if version is None:
            return None
        return self._listed(model_id, self._find_record(model_id, version))

    def get(self, model_id: str, version: int) -> PublishedVersion:
        """See `Registry.get`."""
        return self._version(model_id, self._find_record(model_id, version))

    def _version(
        self, model_id: str, record: VersionRecord, *, is_fresh: bool = False
    ) -> PublishedVersion:
        manifest = json.loads(self._read_manifest(record.manifest_digest, is_fresh=is_fresh))
        return version_of(model_id, record, manifest)

    def _listed(self, model_id: str, record: VersionRecord) -> PublishedVersion:
        """Return the version. If its manifest is damaged, `manifest` is empty and `damage` is set."""
        try:
            return self._version(model_id, record)
        except self.damages as error:
            return version_of(model_id, record, {}, damage=error.message)

    def _check_alias_target(self, model_id: str, version: int, *, must_pass: bool) -> None:
        """Check that an alias may name the version. Raises NotFound, Corrupt (VERSION_DAMAGED).

        With `must_pass` it also raises PreconditionFailed (CHECKS_FAILED) if the version records a failed check.
        """
        record = self._find_record(model_id, version)
        try:
            manifest = self._version(model_id, record, is_fresh=True).manifest
        except Corrupt as error:
            raise version_damaged_error(model_id, version, error) from error
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


def version_damaged_error(model_id: str, version: int, error: Corrupt) -> Corrupt:
    """The error for naming a damaged `version`. `error` is the error of reading it."""
    return Corrupt(
        f"version {version} of {model_id!r} is damaged, so no alias may name it: {error.message}."
        " Name another version, or publish the same contents again",
        reason="VERSION_DAMAGED",
        metadata={**error.metadata, "model_id": model_id, "version": str(version)},
    )
