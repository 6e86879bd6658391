"""The router that a job goes on from: looked up when the job is created, and what the job needs of it fetched when it
starts."""

import hashlib
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.spec import CalibrationSpec, ParentRouter
from calibrator_service.learning.pools import check_parent
from shared.errors import Corrupt, PreconditionFailed
from shared.ladder.blob_names import MAX_BLOB_BYTES, STATISTICS_BLOB, heads_blob
from shared.registry.base import PublishedVersion
from shared.registry.contents import blob_digest, blob_size_bytes, hexadecimal_of
from shared.registry.factory import open_registry
from shared.registry.registry import Registry

MAX_STATISTICS_BYTES = 1 << 30
# A file is named by its digest.
_STATISTICS, _HEADS = "parent-", "heads-"


@dataclass(frozen=True)
class ParentFiles:
    """What a job has of its parent: statistics, or none, and, for a router that has its parent's heads, the blob with
    these."""

    statistics: Path | None
    heads: Path | None = None


def find_parent(registry: Registry, model_id: str, asked: ParentRouter, pool: str = "") -> ParentRouter:
    """The immutable version that `asked` names, by number or by alias, with its digest. `pool`: of the router that goes
    on from it, which has its parent's heads, and needs no statistics, if that is not "".

    Raises NotFound, Corrupt (its manifest is damaged), PreconditionFailed (PARENT_MISMATCH: it is not the version with
    the digest that was asked for; NO_STATISTICS: it was published without statistics; OTHER_POOL).
    """
    published = registry.get(model_id, asked.version) if asked.version else registry.resolve(model_id, asked.alias)
    _check_parent(published, asked, needs_statistics=not pool)
    check_parent(published.manifest, pool)
    return replace(asked, version=published.version, manifest_digest=published.manifest_digest)


def fetch_parent(registry: str, spec: CalibrationSpec, work_dir: Path) -> ParentFiles | None:
    """The files of the spec's parent; None if it has none. Later starts of the job find them in `work_dir`.

    Raises as `find_parent`, what the registry raises, and Corrupt if a file does not match its digest or is too large.
    """
    if spec.parent is None:
        return None
    found = ParentFiles(_found(work_dir, _STATISTICS), _found(work_dir, _HEADS))
    if found.heads if spec.may_have_parents_heads else found.statistics:
        return found
    with closing(open_registry(registry)) as opened:
        published = opened.get(spec.model_id, spec.parent.version)
        _check_parent(published, spec.parent, needs_statistics=not spec.may_have_parents_heads)
        entries = published.manifest.get("blobs", {})
        statistics = heads = None
        if STATISTICS_BLOB in entries:
            statistics = _fetched(opened, published, STATISTICS_BLOB, work_dir / _STATISTICS, MAX_STATISTICS_BYTES)
        if spec.may_have_parents_heads:  # the last, by which a later start knows that it has all
            heads = _fetched(opened, published, heads_blob(entries), work_dir / _HEADS, MAX_BLOB_BYTES)
    return ParentFiles(statistics, heads)


def _found(work_dir: Path, prefix: str) -> Path | None:
    for path in work_dir.glob(f"{prefix}*"):
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == path.name.removeprefix(prefix):
                return path
    return None


def _fetched(registry: Registry, published: PublishedVersion, name: str, prefix: Path, most_bytes: int) -> Path:
    size_bytes = blob_size_bytes(published.manifest, name)
    if size_bytes > most_bytes:
        raise Corrupt(f"{name} of version {published.version} has {size_bytes} bytes; at most {most_bytes} are read")
    digest = blob_digest(published.manifest, name, published.model_id, published.version)
    path = prefix.with_name(f"{prefix.name}{hexadecimal_of(digest)}")
    write_atomically(path, registry.read_blob(published, name))
    return path


def _check_parent(published: PublishedVersion, asked: ParentRouter, *, needs_statistics: bool) -> None:
    if asked.manifest_digest and asked.manifest_digest != published.manifest_digest:
        raise PreconditionFailed(
            f"version {published.version} of {published.model_id!r} has the digest {published.manifest_digest}, not "
            f"{asked.manifest_digest}",
            reason="PARENT_MISMATCH",
        )
    if needs_statistics and STATISTICS_BLOB not in published.manifest.get("blobs", {}):
        raise PreconditionFailed(
            f"version {published.version} of {published.model_id!r} has no statistics, so no calibration can go on "
            "from it: it was imported without them, or is too large. Calibrate it again, or name another version",
            reason="NO_STATISTICS",
            metadata={"version": str(published.version)},
        )
