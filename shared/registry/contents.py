"""Shared by all backends: the stored form of manifests and blobs, limits, and errors."""

from collections.abc import Mapping
from typing import Any, Literal

from shared.digests import DIGEST_PATTERN, PREFIX, digest_of
from shared.errors import AlreadyExists, Conflict, Corrupt, InvalidInput, NotFound, PreconditionFailed
from shared.ladder.blob_names import blob_entry
from shared.registry.encoding import canonical_json
from shared.registry.names import check_blob_name

MAX_MANIFEST_BYTES = 2 * 1024 * 1024
MAX_BLOBS = 256
MAX_LIST = 1000

Kind = Literal["blobs", "manifests"]


def blob_entries(blobs: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return what a registry adds to a manifest as "blobs". Raises InvalidInput (BAD_BLOB_NAME)."""
    return {check_blob_name(name): blob_entry(data) for name, data in blobs.items()}


def encode_manifest(manifest: Mapping[str, Any], blobs: Mapping[str, bytes]) -> bytes:
    """Encode the manifest with its list of blobs as canonical JSON. Raises InvalidInput."""
    if "blobs" in manifest:
        raise InvalidInput("the manifest's key 'blobs' is reserved for the registry", reason="BAD_MANIFEST")
    if not 1 <= len(blobs) <= MAX_BLOBS:
        raise InvalidInput(f"a router has 1 to {MAX_BLOBS} blobs; this one has {len(blobs)}", reason="BAD_BLOBS")
    encoded = canonical_json({**manifest, "blobs": blob_entries(blobs)})
    if len(encoded) > MAX_MANIFEST_BYTES:
        raise InvalidInput(
            f"the manifest has {len(encoded)} bytes; at most {MAX_MANIFEST_BYTES} are allowed",
            reason="MANIFEST_TOO_LARGE",
        )
    return encoded


def hexadecimal_of(digest: str) -> str:
    """Return the hexadecimal digits of a stored digest. Raises Corrupt if it is malformed."""
    if not DIGEST_PATTERN.fullmatch(digest):
        raise Corrupt("a stored digest is malformed", metadata={"expected_digest": digest[:80]})
    return digest.removeprefix(PREFIX)


def content_path(kind: Kind, digest: str) -> str:
    """Return the path of a blob or a manifest in a registry. Raises Corrupt if `digest` is malformed."""
    hexadecimal = hexadecimal_of(digest)
    return f"{kind}/sha256/{hexadecimal[:2]}/{hexadecimal}"


def check_size(kind: Kind, digest: str, found_bytes: int, size_bytes: int | None) -> None:
    """Check a stored content's size before it is read. `size_bytes` None: not known.
    Raises Corrupt, also for a too large manifest."""
    if size_bytes is not None and found_bytes != size_bytes:
        raise content_damaged(kind, digest, f"has {found_bytes} bytes, not {size_bytes}")
    if kind == "manifests" and found_bytes > MAX_MANIFEST_BYTES:
        what = f"has {found_bytes} bytes, more than {MAX_MANIFEST_BYTES}"
        raise content_damaged(kind, digest, what)


def check_digest(kind: Kind, digest: str, data: bytes) -> bytes:
    """Return `data`. Raises Corrupt with metadata expected_digest and actual_digest if it has another digest."""
    actual = digest_of(data)
    if actual != digest:
        raise content_damaged(kind, digest, f"has the digest {actual}", actual)
    return data


def content_damaged(kind: Kind, digest: str, what: str, actual: str = "") -> Corrupt:
    """The error for a content that cannot be used. `actual` is its digest, "" if it is missing or was not read."""
    return Corrupt(
        f"the stored {kind[:-1]} {digest} {what}",
        metadata={"expected_digest": digest, "actual_digest": actual, "kind": kind[:-1]},
    )


def failed_checks(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the failed checks in a manifest's record {"checks": {name: {"passed": bool, ..}}}.

    A manifest without the record has no failed checks.
    """
    checks = manifest.get("checks", {})
    if not isinstance(checks, Mapping):
        return ["checks"]
    return sorted(
        str(name) for name, check in checks.items() if not (isinstance(check, Mapping) and check.get("passed") is True)
    )


def check_passed(manifest: Mapping[str, Any], what: str) -> None:
    """Refuse to let an alias name a router with failed checks. Raises PreconditionFailed (CHECKS_FAILED)."""
    failed = failed_checks(manifest)
    if failed:
        raise PreconditionFailed(
            f"{what} did not pass its checks ({', '.join(failed)}), so no alias may name it",
            reason="CHECKS_FAILED",
            metadata={"failed": ", ".join(failed)},
        )


def check_limit(limit: int) -> int:
    """Check the limit of a list. Raises InvalidInput."""
    if not 1 <= limit <= MAX_LIST:
        raise InvalidInput(f"limit is {limit}; it must be in [1, {MAX_LIST}]")
    return limit


def check_expected(expected_version: int | None, current: int, model_id: str, alias: str) -> None:
    """Compare the versions for a compare-and-swap. 0 means that the alias does not exist.
    Raises InvalidInput, Conflict."""
    if expected_version is None:
        return
    if expected_version < 0:
        raise InvalidInput(f"expected_version is {expected_version}; it must not be negative")
    if expected_version != current:
        raise Conflict(
            f"alias {alias!r} of {model_id!r} names {f'version {current}' if current else 'nothing'} now, not"
            f" {f'version {expected_version}' if expected_version else 'nothing'}",
            reason="ALIAS_MOVED",
            metadata={"current_version": str(current)},
        )


def blob_digest(manifest: Mapping[str, Any], name: str, model_id: str, version: int) -> str:
    """Return the digest of a blob. Raises NotFound, which lists the blobs."""
    entries = manifest.get("blobs", {})
    if name not in entries:
        raise NotFound(
            f"version {version} of {model_id!r} has no blob {name!r}",
            reason="BLOB_NOT_FOUND",
            metadata={"blobs": ", ".join(sorted(entries))},
        )
    return str(entries[name]["digest"])


def blob_size_bytes(manifest: Mapping[str, Any], name: str) -> int:
    """Return the size in the manifest of a blob that it contains."""
    return int(manifest["blobs"][name]["size_bytes"])


def other_contents_error(request_id: str, model_id: str, version: int | None) -> AlreadyExists:
    """The error for a `request_id` in use. `version` is None if it belongs to a publication that has not ended."""
    as_version = "" if version is None else f" version {version} of"
    metadata = {"model_id": model_id}
    if version is not None:
        metadata["version"] = str(version)
    return AlreadyExists(
        f"request {request_id!r} has already published other contents, as{as_version} {model_id!r}", metadata=metadata
    )


def no_version_error(model_id: str, version: int) -> NotFound:
    return NotFound(
        f"model {model_id!r} has no router version {version}",
        reason="ROUTER_VERSION_NOT_FOUND",
        metadata={"model_id": model_id, "version": str(version)},
    )


def no_alias_error(model_id: str, alias: str, known: Mapping[str, Any]) -> NotFound:
    names = ", ".join(sorted(known))
    there_are = f"there are: {names}" if known else "it has none"
    return NotFound(
        f"model {model_id!r} has no alias {alias!r}; {there_are}",
        reason="ALIAS_NOT_FOUND",
        metadata={"model_id": model_id, "alias": alias, "aliases": names},
    )


def no_earlier_version_error(model_id: str, alias: str, version: int) -> PreconditionFailed:
    return PreconditionFailed(
        f"alias {alias!r} of {model_id!r} has named only version {version}, so it has no previous version",
        reason="NO_EARLIER_VERSION",
    )


def version_damaged_error(model_id: str, version: int, error: Corrupt) -> Corrupt:
    """The error for naming a damaged `version`. `error` is the error of reading it."""
    return Corrupt(
        f"version {version} of {model_id!r} is damaged, so no alias may name it: {error.message}."
        " Name another version, or publish the same contents again",
        reason="VERSION_DAMAGED",
        metadata={**error.metadata, "model_id": model_id, "version": str(version)},
    )
