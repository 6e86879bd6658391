"""`neap routers push`, `pull` and `import` over an OCI registry: Debian's docker-registry."""

import base64
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from shared.digests import digest_of
from shared.exchange.oci import ARTEFACT, FINGERPRINT, MEDIA_TYPES, TITLE
from shared.ladder.blob_names import LADDER_BLOB, MANIFEST
from shared.registry.factory import open_registry
from tests import router_folders
from tests.http_servers import HttpServer, Quiet
from tests.oci_registry import OciRegistry
from tests.router_folders import write_router

pytest.importorskip("oras.provider", reason="no oras: pip install 'neap-server[oci]'")
IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciRegistry]:
    with OciRegistry(tmp_path_factory.mktemp("oci")).running() as server:
        yield server


@pytest.fixture
def url(registry: OciRegistry, request: pytest.FixtureRequest) -> str:
    name = request.node.name.split("[")[0].replace("_", "-")
    return f"oci://{registry.host}/neap/{name}:v1"


@pytest.fixture
def push(neap, tmp_path: Path) -> Callable[..., str]:
    """Pushes a router of a registry that has one, and returns the address by digest."""
    flags = ["--data-dir", str(tmp_path / "here"), "--model", "tiny"]
    neap("routers", "import", str(write_router(tmp_path / "router")), *flags, "--alias", "latest")

    def push(url: str, *more: str, code: int = 0) -> str:
        result = neap("routers", "push", url, *flags, *more, code=code)
        return result.stderr if code else result.stdout.split()[-1]

    return push


def image_manifest(address: str) -> dict:
    host, _, rest = address.removeprefix("oci://").partition("/")
    name, _, digest = rest.partition("@")
    request = Request(f"http://{host}/v2/{name}/manifests/{digest}", headers={"Accept": IMAGE_MANIFEST})
    with urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def layers_of(address: str) -> dict[str, dict]:
    return {layer["annotations"][TITLE]: layer for layer in image_manifest(address)["layers"]}


def test_a_pushed_router_has_its_digest_where_it_is_imported(neap, push, url, tmp_path):
    address = push(url, "--license", "apache-2.0")
    assert push(url, "--license", "apache-2.0") == address  # the same files have the same digest
    document = image_manifest(address)
    assert document["config"]["mediaType"] == ARTEFACT
    assert document["annotations"][FINGERPRINT] == router_folders.FINGERPRINT
    assert document["annotations"]["org.opencontainers.image.licenses"] == "apache-2.0"
    layers = layers_of(address)
    assert {name: layer["mediaType"] for name, layer in layers.items()} == {
        name: MEDIA_TYPES[Path(name).suffix] for name in (LADDER_BLOB, MANIFEST, "README.md")
    }
    for source in (url, address):
        neap("routers", "import", source, "--data-dir", str(tmp_path / "there"), "--alias", "latest")
    made = open_registry(str(tmp_path / "here/registry")).get("tiny", 1)
    there = open_registry(str(tmp_path / "there/registry")).list_versions("tiny")
    assert [version.manifest_digest for version in there] == [made.manifest_digest]
    neap("routers", "pull", url, str(tmp_path / "pulled"))
    assert {path.name: digest_of(path.read_bytes()) for path in (tmp_path / "pulled").iterdir()} == {
        name: layers[name]["digest"] for name in (LADDER_BLOB, MANIFEST)
    }


@pytest.mark.parametrize("name", [LADDER_BLOB, MANIFEST])
def test_a_changed_byte_is_found(neap, push, url, registry, tmp_path, name):
    path = registry.blob(layers_of(push(url))[name]["digest"])
    data = path.read_bytes()
    try:
        path.write_bytes(data.replace(b"tiny", b"tony") if name == MANIFEST else data[:-1] + b"\x01")
        said = neap("routers", "pull", url, str(tmp_path / "pulled"), code=1).stderr
    finally:
        path.write_bytes(data)  # other tests push the same bytes, which the registry has once
    assert said.endswith("the registry gives other bytes than its digest says [CORRUPT]\n")
    assert not (tmp_path / "pulled").exists()


def test_what_is_not_there_or_cannot_be_named_is_said(neap, push, url, tmp_path):
    for wrong, reason in (
        (url.replace(":v1", ":v2"), "ROUTER_NOT_FOUND"),
        (url.replace(":v1", "@sha256:" + "0" * 64), "ROUTER_NOT_FOUND"),
        ("oci://127.0.0.1:1/neap/tiny:v1", "REGISTRY_UNAVAILABLE"),
        ("oci://tiny:v1", "BAD_ROUTER_URL"),
        (url.replace("neap", "../neap"), "BAD_ROUTER_URL"),
    ):
        assert f"[{reason}]" in neap("routers", "pull", wrong, str(tmp_path / "pulled"), code=1).stderr
    assert "[BAD_ROUTER_URL]" in push(url.replace(":v1", "@sha256:" + "0" * 64), code=1)
    assert "[BAD_ARGUMENT]" in push(url, "--revision", "main", code=1)


def test_credentials_are_those_of_docker(neap, push, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with OciRegistry(tmp_path / "asks", asks=True).running() as server:
        url = f"oci://{server.host}/neap/tiny:v1"
        assert "[REGISTRY_DENIED]" in push(url, code=1)
        for password, code in (("wrong", 1), ("secret", 0)):
            known = {"auths": {server.host: {"auth": base64.b64encode(f"ann:{password}".encode()).decode()}}}
            (tmp_path / ".docker").mkdir(exist_ok=True)
            (tmp_path / ".docker/config.json").write_text(json.dumps(known))
            said = push(url, code=code)
            assert ("[REGISTRY_DENIED]" in said) == bool(code)
        neap("routers", "pull", url, str(tmp_path / "pulled"))


def lying_registry(document: bytes) -> HttpServer:
    """Answers every manifest with `document`, and every blob with a hundred bytes."""

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = document if "/manifests/" in self.path else b"x" * 100
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return HttpServer(Handler)


def image(config: str = ARTEFACT, size: object = 1, digest: str = "sha256:" + "0" * 64) -> bytes:
    layers = [
        {"digest": digest, "size": size, "annotations": {TITLE: name}} for name in (MANIFEST, LADDER_BLOB, "../x")
    ]
    return json.dumps({"config": {"mediaType": config}, "layers": layers}).encode()


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (image("application/vnd.oci.image.config.v1+json"), "ROUTER_NOT_FOUND"),
        (image(size=2 << 30), "ROUTER_TOO_LARGE"),
        (image(size=-1), "CORRUPT"),
        (image(digest="md5:0"), "CORRUPT"),
        (image(), "CORRUPT"),  # more bytes than it says
        (b"{", "CORRUPT"),
        (b" " * (5 << 20), "ROUTER_TOO_LARGE"),
        (b'{"config": {}}', "ROUTER_NOT_FOUND"),
    ],
)
def test_a_registry_that_lies_is_not_believed(neap, tmp_path, document, reason):
    server = lying_registry(document)
    with server.answering():
        url = f"oci://127.0.0.1:{server.server_port}/neap/tiny:v1"
        result = neap("routers", "pull", url, str(tmp_path / "pulled"), code=1)
    assert f"[{reason}]" in result.stderr
    assert not (tmp_path / "pulled").exists()
