"""Routers as artefacts in registries that speak the OCI distribution API, by the library oras. Credentials are those of
Docker's configuration (~/.docker/config.json, which `docker login` writes). A registry on loopback is spoken to in
plain HTTP, any other over TLS.

An artefact is an image manifest with the configuration {} of the media type ARTEFACT, and a layer for each file: its
name is the annotation org.opencontainers.image.title, its digest is checked. The same files give the same digest.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from shared.digests import DIGEST_PATTERN, PREFIX, digest_of
from shared.errors import Corrupt, InvalidInput, NeapError, NotFound, PermissionDenied, Unavailable
from shared.exchange.address import RouterAddress
from shared.exchange.files import MAX_BYTES, optional_module, wanted

EXTRA = "oci"
ARTEFACT = "application/vnd.neap.router.v1+json"
MEDIA_TYPES = {
    ".json": "application/vnd.neap.router.manifest.v1+json",
    ".safetensors": "application/vnd.neap.router.safetensors",
    ".sig": "application/vnd.dev.sigstore.bundle.v0.3+json",
    ".md": "text/markdown",
    ".png": "image/png",
}
TITLE = "org.opencontainers.image.title"
# Annotations of the artefact, beside org.opencontainers.image.licenses where the licence is known.
MODEL_ID, FINGERPRINT = "dev.neap.model.id", "dev.neap.model.fingerprint"
MAX_IMAGE_MANIFEST_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
CONNECT_S, READ_S = 10.0, 60.0
# A failed request is repeated once, at once: oras itself would wait for two minutes in all.
ATTEMPTS = 2


def push(folder: Path, address: RouterAddress, annotations: Mapping[str, str]) -> RouterAddress:
    """Uploads the files of `folder` and tags them. Returns the address by digest.

    Raises InvalidInput (BAD_ROUTER_URL), PermissionDenied (REGISTRY_DENIED), Unavailable (REGISTRY_UNAVAILABLE) and
    PreconditionFailed (EXTRA_MISSING).
    """
    if address.is_digest:
        raise InvalidInput(f"{address} names a digest; a router is pushed to a tag", reason="BAD_ROUTER_URL")
    files = [f"{path}:{MEDIA_TYPES[path.suffix]}" for path in sorted(folder.iterdir())]
    with _registry(address) as client:
        done = client.push(
            _target(address),
            files=files,
            manifest_config=f"{os.devnull}-none:{ARTEFACT}",
            manifest_annotations=dict(annotations),
            disable_path_validation=True,
            quiet=True,
        )
    return RouterAddress(address.scheme, address.name, digest_of(done.request.body))


def fetch(address: RouterAddress, folder: Path) -> None:
    """Downloads a router's files into `folder`, and checks their digests.

    Raises NotFound (ROUTER_NOT_FOUND), Corrupt (ROUTER_TOO_LARGE, or other bytes than their digest says),
    PermissionDenied (REGISTRY_DENIED), Unavailable (REGISTRY_UNAVAILABLE) and PreconditionFailed (EXTRA_MISSING).
    """
    with _registry(address) as client:
        container = client.get_container(_target(address))
        layers = _layers(_image_manifest(client, container, address), address)
        for name in wanted({name: size for name, (_, size) in layers.items()}, address):
            digest, size_bytes = layers[name]
            _download(client.get_blob(container, digest, stream=True), folder / name, digest, size_bytes, address)


def _target(address: RouterAddress) -> str:
    return str(address).removeprefix("oci://")


def _image_manifest(client: Any, container: Any, address: RouterAddress) -> Mapping[str, Any]:
    url = f"{client.prefix}://{container.manifest_url()}"
    accepted = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    with client.do_request(url, "GET", headers=accepted, stream=True) as response:
        _check_status(response, address)
        data = b""
        for chunk in response.iter_content(CHUNK_BYTES):
            data += chunk
            if len(data) > MAX_IMAGE_MANIFEST_BYTES:
                raise Corrupt(f"the image manifest of {address} is too large", reason="ROUTER_TOO_LARGE")
    if address.is_digest and digest_of(data) != address.version:
        raise Corrupt(f"the registry gives another image manifest for {address}")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"the image manifest of {address} is not JSON") from error
    if not isinstance(document, dict) or (document.get("config") or {}).get("mediaType") != ARTEFACT:
        raise NotFound(
            f"{address} holds no router: it is no artefact of the type {ARTEFACT}", reason="ROUTER_NOT_FOUND"
        )
    return document


def _layers(document: Mapping[str, Any], address: RouterAddress) -> dict[str, tuple[str, int]]:
    """(digest, size in bytes) of each file that belongs to a router."""
    found = {}
    try:
        for layer in document["layers"]:
            name = layer["annotations"][TITLE]
            if name in MAX_BYTES:
                digest, size_bytes = layer["digest"], layer["size"]
                if not (DIGEST_PATTERN.fullmatch(digest) and isinstance(size_bytes, int) and size_bytes >= 0):
                    raise ValueError
                found[name] = (digest, size_bytes)
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"the image manifest of {address} is not valid") from error
    return found


def _download(response: Any, path: Path, digest: str, size_bytes: int, address: RouterAddress) -> None:
    hasher, count = hashlib.sha256(), 0
    with response, path.open("wb") as file:
        _check_status(response, address)
        for chunk in response.iter_content(CHUNK_BYTES):
            count += len(chunk)
            if count > size_bytes:
                break
            hasher.update(chunk)
            file.write(chunk)
    if count != size_bytes or PREFIX + hasher.hexdigest() != digest:
        raise Corrupt(
            f"{path.name} of {address} is damaged: the registry gives other bytes than its digest says",
            metadata={"expected_digest": digest},
        )


def _check_status(response: Any, address: RouterAddress) -> None:
    if response.status_code == 404:
        raise NotFound(f"there is no {address}", reason="ROUTER_NOT_FOUND")
    if response.status_code in (401, 403):
        raise _denied(address)
    if response.status_code != 200:
        raise _unavailable(address, f"status {response.status_code}")


@contextmanager
def _registry(address: RouterAddress) -> Iterator[Any]:
    """A client of the address' registry. Errors of the library become NeapErrors."""
    provider = optional_module("oras.provider", EXTRA)
    requests = optional_module("requests", EXTRA)
    logging = optional_module("oras.logger", EXTRA)
    logging.setup_logger(quiet=True)
    session = requests.Session()
    try:
        for scheme in ("http://", "https://"):
            session.mount(scheme, _adapter(requests))
        host = address.name.partition("/")[0]
        is_plain = _is_loopback(host)
        challenge = session.get(f"http{'s' * (not is_plain)}://{host}/v2/").headers.get("WWW-Authenticate", "")
        backend = "basic" if challenge.lower().startswith("basic") else "token"
        client = provider.Registry(insecure=is_plain, auth_backend=backend)
        client.session = client.auth.session = session
        # Without the decorator that repeats requests.
        client.do_request = provider.Registry.do_request.__wrapped__.__get__(client)
        client.auth.load_configs(client.get_container(_target(address)))
        if backend == "basic" and not hasattr(client.auth, "_basic_auth"):
            raise _denied(address)
        yield client
    except NeapError:
        raise
    except requests.exceptions.RequestException as error:
        raise _unavailable(address, type(error).__name__) from error
    except Exception as error:  # oras has no errors of its own, beside one of authentication
        text = str(error)
        if "uthenticat" in type(error).__name__ + text or "nauthorized" in text or "orbidden" in text:
            raise _denied(address) from error
        raise _unavailable(address, text) from error
    finally:
        session.close()


def _adapter(requests: Any) -> Any:
    adapter = requests.adapters.HTTPAdapter(max_retries=ATTEMPTS - 1)
    send = adapter.send

    def send_in_time(*args: Any, **options: Any) -> Any:
        return send(*args, **{**options, "timeout": (CONNECT_S, READ_S)})

    adapter.send = send_in_time
    return adapter


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"


def _denied(address: RouterAddress) -> NeapError:
    return PermissionDenied(
        f"the registry does not let you do this with {address}; `docker login` gives it credentials",
        reason="REGISTRY_DENIED",
    )


def _unavailable(address: RouterAddress, why: str) -> NeapError:
    return Unavailable(
        f"the registry of {address} does not answer, or fails: {' '.join(why.split())[:200]}",
        reason="REGISTRY_UNAVAILABLE",
    )
