"""Redis over TLS, with a user and a password. The servers at hand are built without TLS, so a proxy ends it before them."""

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.registry.factory import open_registry
from tests.registry_servers import shared_url


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Self-signed, for 127.0.0.1; its key lies beside it as key.pem."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return tmp_path / "cert.pem"


@contextmanager
def tls_before(port: int, certificate: Path) -> Iterator[int]:
    """A port that speaks TLS and hands on to `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError):
                wrapped = context.wrap_socket(client, server_side=True)
                server = socket.create_connection(("127.0.0.1", port))
                for ends in ((wrapped, server), (server, wrapped)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def test_tls_and_a_user(own_redis, s3, certificate):
    with own_redis.client() as client:
        rights = ["+@read", "+@write", "+@scripting", "+@connection"]
        client.acl_setuser(
            "neap", enabled=True, passwords=["+s3cr3t@/"], keys=["neap:*"], categories=rights
        )
    with tls_before(own_redis.port, certificate) as port:
        url = shared_url(own_redis, s3).replace(
            f"redis://127.0.0.1:{own_redis.port}", f"rediss://neap:s3cr3t%40%2F@127.0.0.1:{port}"
        )
        with closing(open_registry(f"{url}&ssl_ca_certs={certificate}")) as registry:
            registry.publish("tiny", {}, {"x": b"1"}, request_id="one")
            registry.set_alias("tiny", "stable", 1)
            assert registry.resolve("tiny", "stable").version == 1
            assert len(list(registry.events("tiny", timeout_s=0.1))) == 3
        with pytest.raises(Unavailable) as raised:
            open_registry(url)  # nobody vouches for that certificate
        assert raised.value.reason == "REDIS_UNAVAILABLE"
        assert "s3cr3t" not in raised.value.message
