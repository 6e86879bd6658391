"""Signatures of routers in the format of OpenSSF Model Signing, by the library model-signing: a Sigstore bundle over
the digests of a router's files, with an elliptic-curve key, or a key and its certificate. Nothing here asks a network.

What is signed is manifest.json with the digests of the other files, and these files. A registry keeps the signature as
a blob of the version and does not keep manifest.json, which follows from what it keeps (`manifest_file`). So a worker
verifies a version by its manifest and its signature alone, before it fetches the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shared.digests import PREFIX, digest_of
from shared.errors import InvalidInput, NeapError, PreconditionFailed
from shared.exchange.files import CARD, PICTURE, check_weight, optional_module
from shared.ladder.blob_names import MANIFEST, SIGNATURE_BLOB, manifest_file
from shared.registry.base import PublishedVersion

EXTRA = "sign"
# Beside a router's files, and not signed: so that `model_signing verify` takes a folder as it is.
UNSIGNED = [CARD, PICTURE, SIGNATURE_BLOB, ".gitattributes", ".cache"]
# What the library and cryptography raise for a file that holds something else.
_WRONG_FILE = (OSError, ValueError, TypeError, AttributeError)


class _Digests:
    """Stands in for the library's hashing of a folder: the digests of files are known here."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        manifest = optional_module("model_signing.manifest", EXTRA)
        digest = optional_module("model_signing._hashing.hashing", EXTRA).Digest
        form = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": UNSIGNED}
        kind = manifest.SerializationType.from_args(form)
        items = [
            kind.new_item(name, digest("sha256", bytes.fromhex(known.removeprefix(PREFIX))))
            for name, known in digests.items()
        ]
        self._manifest = manifest.Manifest("router", items, kind)

    def hash(self, _path: object, **_: object) -> Any:
        return self._manifest

    def add_ignored_paths(self, **_: object) -> None:
        """The signature says which files of a folder it does not cover. There are none of them here."""


def signed_files(manifest: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, str]:
    """The digests that a signature covers, by file name. `manifest`: without "blobs", which are the `entries`."""
    blobs = {name: str(entry["digest"]) for name, entry in entries.items() if name != SIGNATURE_BLOB}
    return {MANIFEST: digest_of(manifest_file(manifest, entries)), **blobs}


def sign(files: Mapping[str, str], key: Path, certificates: Sequence[Path] = ()) -> bytes:
    """The signature over `signed_files` by the private key in `key`, an unencrypted PEM file of a NIST curve.
    `certificates`: the key's own, and then those between it and the root.

    Raises InvalidInput (BAD_KEY) and PreconditionFailed (EXTRA_MISSING).
    """
    config = optional_module("model_signing.signing", EXTRA).Config()
    try:
        if certificates:
            own, *chain = certificates
            # The library cannot read an empty chain.
            config.use_certificate_signer(private_key=key, signing_certificate=own, certificate_chain=chain or [own])
        else:
            config.use_elliptic_key_signer(private_key=key)
    except _WRONG_FILE as error:
        raise _bad_key(
            key, "an unencrypted private key of a NIST curve, with its certificate if one is given"
        ) from error
    with TemporaryDirectory(prefix="neap-sign-") as folder:
        path = Path(folder) / SIGNATURE_BLOB
        config.set_hashing_config(_Digests(files)).sign(folder, path)
        return path.read_bytes()


class Verifier:
    """Accepts what one of `trusted` has signed: PEM files, each with a public key, or with the certificates of the
    authorities that issue signers' certificates. The files are read at each check, so they may be replaced.

    Raises InvalidInput (BAD_KEY) and PreconditionFailed (EXTRA_MISSING) at once for files that cannot be used.
    """

    def __init__(self, trusted: Sequence[Path]) -> None:
        self._trusted = trusted
        for path in trusted:
            _verifying(path)

    def check(self, files: Mapping[str, str], signature: bytes | None, what: str) -> None:
        """Raises PreconditionFailed: SIGNATURE_MISSING, or SIGNATURE_INVALID if none of the trusted has signed these
        files. A certificate counts as of the day from which it is valid, so that signatures outlive it."""
        if signature is None:
            raise PreconditionFailed(f"{what} is not signed, and a signature is asked for", reason="SIGNATURE_MISSING")
        check_weight(SIGNATURE_BLOB, len(signature), what)
        found = _Digests(files)
        with TemporaryDirectory(prefix="neap-verify-") as folder:
            path = Path(folder) / SIGNATURE_BLOB
            path.write_bytes(signature)
            causes = []
            for trusted in self._trusted:
                config = _verifying(trusted).set_hashing_config(found)
                try:
                    config.verify(Path(folder), path)
                    return
                except Exception as error:  # the library reads bytes of strangers, and raises what its parsers raise
                    causes.append(error)
        raise PreconditionFailed(
            f"{what} has other contents than were signed, or none of the trusted keys has signed it",
            reason="SIGNATURE_INVALID",
        ) from causes[-1]

    def check_version(self, version: PublishedVersion, read_blob: Callable[[PublishedVersion, str], bytes]) -> None:
        """As `check`, for a version in a registry. Raises what `read_blob` raises, too."""
        what = f"version {version.version} of {version.model_id!r}"
        entries = version.manifest.get("blobs", {})
        rest = {name: value for name, value in version.manifest.items() if name != "blobs"}
        signature = None
        if SIGNATURE_BLOB in entries:
            check_weight(SIGNATURE_BLOB, int(entries[SIGNATURE_BLOB]["size_bytes"]), what)
            signature = read_blob(version, SIGNATURE_BLOB)
        self.check(signed_files(rest, entries), signature, what)


def verifier_of(trusted: Sequence[Path]) -> Verifier | None:
    """None if there are no files: then nothing need be signed. Raises as `Verifier`."""
    return Verifier(trusted) if trusted else None


def _verifying(path: Path) -> Any:
    config = optional_module("model_signing.verifying", EXTRA).Config()
    try:
        if b"BEGIN CERTIFICATE" in path.read_bytes():
            return config.use_certificate_verifier(certificate_chain=[path])
        return config.use_elliptic_key_verifier(public_key=path)
    except _WRONG_FILE as error:
        raise _bad_key(path, "a public key of a NIST curve, or certificates") from error


def _bad_key(path: Path, expected: str) -> NeapError:
    return InvalidInput(f"{path} cannot be used: it must be a PEM file of {expected}", reason="BAD_KEY")
