"""Redis over TLS, with a user and a password. The test servers are built without TLS, so a proxy terminates TLS in
front of them."""

import shutil
import ssl
import subprocess
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.registry.factory import open_registry
from tests.registry_servers import shared_url
from tests.relay import relay


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Self-signed, for 127.0.0.1; its key is in key.pem in the same folder."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return tmp_path / "cert.pem"


def tls_before(port: int, certificate: Path) -> AbstractContextManager[int]:
    """A port that accepts TLS and forwards to `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    return relay(port, accept=lambda client: context.wrap_socket(client, server_side=True))


def test_the_registry_works_over_tls_with_a_user_and_a_password(own_redis, s3, certificate):
    with own_redis.client() as client:
        rights = ["+@read", "+@write", "+@scripting", "+@connection"]
        client.acl_setuser("neap", enabled=True, passwords=["+s3cr3t@/"], keys=["neap:*"], categories=rights)
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
            open_registry(url)  # the certificate is not signed by a known authority
        assert raised.value.reason == "REDIS_UNAVAILABLE"
        assert "s3cr3t" not in raised.value.message
