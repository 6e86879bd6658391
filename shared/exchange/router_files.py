"""A router's files on their way into a registry: fetched, checked, verified, signed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shared.digests import digest_of
from shared.errors import PreconditionFailed, RouterMismatch
from shared.exchange.address import HUB, RouterAddress, is_url
from shared.exchange.signatures import Verifier, sign, signed_files
from shared.ladder.artefact import unpack_ladder
from shared.ladder.blob_names import SIGNATURE_BLOB
from shared.ladder.checks import check_artefact
from shared.ladder.folder import read_router_folder
from shared.ladder.ladder import ModelIdentity
from shared.registry.base import PublishedVersion
from shared.registry.contents import blob_entries
from shared.registry.encoding import canonical_json
from shared.registry.registry import Registry


@dataclass(frozen=True)
class Signer:
    """`key`: a private key. `certificates`: its own, and then those between it and the root; none for a bare key."""

    key: Path
    certificates: Sequence[Path] = ()


@dataclass(frozen=True)
class RouterFiles:
    """What `Registry.publish` takes."""

    model_id: str
    fingerprint: str
    manifest: dict[str, Any]
    blobs: dict[str, bytes]

    def publish(self, registry: Registry, aliases: Sequence[str], actor: str) -> PublishedVersion:
        """Publishes them, or finds them published; then no alias moves. Raises what the registry raises."""
        contents = {"model_id": self.model_id, "manifest": self.manifest, "blobs": {}}
        contents["blobs"] = {name: digest_of(data) for name, data in self.blobs.items()}
        request_id = f"import-{digest_of(canonical_json(contents))}"
        return registry.publish(
            self.model_id, self.manifest, self.blobs, request_id=request_id, aliases=aliases, actor=actor
        )


@contextmanager
def fetched(source: str) -> Iterator[Path]:
    """The folder that `source` names, or a temporary one with the files of the URL that it is.
    Raises InvalidInput (BAD_ROUTER_URL), and as `fetch` of `shared.exchange.hub` and `shared.exchange.oci`."""
    if not is_url(source):
        yield Path(source)
        return
    address = RouterAddress.parse(source)
    with TemporaryDirectory(prefix="neap-router-") as name:
        # Imported here: each loads a library that the other does without.
        if address.scheme == HUB:
            from shared.exchange import hub

            hub.fetch(address, Path(name))
        else:
            from shared.exchange import oci

            oci.fetch(address, Path(name))
        yield Path(name)


def check_folder(
    folder: Path, source: str, *, verifier: Verifier | None = None, fingerprint: str = ""
) -> tuple[dict[str, Any], dict[str, bytes], ModelIdentity]:
    """The manifest, the blobs and the model of the router in `folder`, which came from `source`. Raises as
    `read_router_folder`, `unpack_ladder` and `Verifier.check`, and RouterMismatch."""
    manifest, blobs = read_router_folder(folder, complete=True)
    if verifier is not None:
        verifier.check(signed_files(manifest, blob_entries(blobs)), blobs.get(SIGNATURE_BLOB), source)
    model = unpack_ladder(manifest, blobs).model
    if fingerprint and fingerprint != model.fingerprint:
        raise RouterMismatch(
            f"{source} is a router of other weights: of {model.fingerprint} ({model.model_id}), not {fingerprint}",
            metadata={"expected": fingerprint, "actual": model.fingerprint},
        )
    return manifest, blobs, model


def read_files(
    source: str,
    model_id: str = "",
    *,
    fingerprint: str = "",
    verifier: Verifier | None = None,
    signer: Signer | None = None,
) -> RouterFiles:
    """The router in a folder or at a URL, checked as a worker checks it. `model_id`: "" means the manifest's.
    `fingerprint`: of the model's weights, if it must be of these.

    Raises as `fetched`, `check_folder` and `sign`, and PreconditionFailed (SIGNATURE_STALE).
    """
    with fetched(source) as folder:
        manifest, blobs, model = check_folder(folder, source, verifier=verifier, fingerprint=fingerprint)
    checked = {**manifest, "checks": check_artefact(manifest, blobs)}
    if signer is not None:
        blobs[SIGNATURE_BLOB] = sign(signed_files(checked, blob_entries(blobs)), signer.key, signer.certificates)
    elif SIGNATURE_BLOB in blobs and checked != manifest:
        raise PreconditionFailed(
            f"the signature of {source} covers other checks than this version of neap makes: sign it anew",
            reason="SIGNATURE_STALE",
        )
    return RouterFiles(model_id or model.model_id, model.fingerprint, checked, blobs)
