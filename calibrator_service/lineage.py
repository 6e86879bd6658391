"""The router that a job goes on from: looked up when the job is created, and its statistics fetched when the job
starts."""

import hashlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.spec import CalibrationSpec, ParentRouter
from calibrator_service.learning.pools import check_parent
from shared.errors import Corrupt, PreconditionFailed
from shared.ladder.blob_names import STATISTICS_BLOB
from shared.registry.base import PublishedVersion
from shared.registry.contents import blob_digest, blob_size_bytes, hexadecimal_of
from shared.registry.factory import open_registry
from shared.registry.registry import Registry

MAX_STATISTICS_BYTES = 1 << 30
# A file is named by its digest.
_PREFIX = "parent-"


def find_parent(registry: Registry, model_id: str, asked: ParentRouter, pool: str = "") -> ParentRouter:
    """The immutable version that `asked` names, by number or by alias, with its digest. `pool`: of the router that goes
    on from it.

    Raises NotFound, Corrupt (its manifest is damaged), PreconditionFailed (PARENT_MISMATCH: it is not the version with
    the digest that was asked for; NO_STATISTICS: it was published without statistics; OTHER_POOL).
    """
    published = registry.get(model_id, asked.version) if asked.version else registry.resolve(model_id, asked.alias)
    _check_parent(published, asked)
    check_parent(published.manifest, pool)
    return replace(asked, version=published.version, manifest_digest=published.manifest_digest)


def fetch_statistics(registry: str, spec: CalibrationSpec, work_dir: Path) -> Path | None:
    """The file with the statistics of the spec's parent; None if it has none.
    Later starts of the job find the file in `work_dir`.

    Raises as `find_parent`, what the registry raises, and Corrupt if the statistics do not match their digest or are
    too large.
    """
    if spec.parent is None:
        return None
    for path in work_dir.glob(f"{_PREFIX}*"):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == path.name.removeprefix(_PREFIX):
                return path
    with closing(open_registry(registry)) as opened:
        published = opened.get(spec.model_id, spec.parent.version)
        _check_parent(published, spec.parent)
        size_bytes = blob_size_bytes(published.manifest, STATISTICS_BLOB)
        if size_bytes > MAX_STATISTICS_BYTES:
            raise Corrupt(
                f"the statistics of version {published.version} have {size_bytes} bytes; at most "
                f"{MAX_STATISTICS_BYTES} are read"
            )
        digest = blob_digest(published.manifest, STATISTICS_BLOB, spec.model_id, published.version)
        path = work_dir / f"{_PREFIX}{hexadecimal_of(digest)}"
        write_atomically(path, opened.read_blob(published, STATISTICS_BLOB))
    return path


def _check_parent(published: PublishedVersion, asked: ParentRouter) -> None:
    if asked.manifest_digest and asked.manifest_digest != published.manifest_digest:
        raise PreconditionFailed(
            f"version {published.version} of {published.model_id!r} has the digest {published.manifest_digest}, not "
            f"{asked.manifest_digest}",
            reason="PARENT_MISMATCH",
        )
    if STATISTICS_BLOB not in published.manifest.get("blobs", {}):
        raise PreconditionFailed(
            f"version {published.version} of {published.model_id!r} has no statistics, so no calibration can go on "
            "from it: it was imported without them, or is too large. Calibrate it again, or name another version",
            reason="NO_STATISTICS",
            metadata={"version": str(published.version)},
        )
