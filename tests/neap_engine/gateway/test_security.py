"""TLS on both sides of the gateway, and tokens."""

import socket
import ssl
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import trustme
from prometheus_client import CollectorRegistry

from neap_engine.gateway.clients import open_client
from shared import errors
from shared.config import make_settings
from shared.gateway_settings import GatewaySettings
from shared.rpc import addresses
from shared.rpc.access import Access
from shared.rpc.certificates import ServerCertificate
from shared.rpc.security import SecurityCollector, ServerSecurity
from tests import certificates
from tests.gateways import chat_body, chunk, finished, gateway_to, scripted_worker, started
from tests.reasons import raises
from tests.tokens import write_tokens

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    """A worker with TLS that asks for tokens."""
    folder = tmp_path_factory.mktemp("secure")
    authority = trustme.CA()
    files = certificates.write(folder, certificates.issued(authority, "localhost", "127.0.0.1"))
    tokens = write_tokens(folder / "tokens")
    security = ServerSecurity(ServerCertificate(files.certificate, files.key), Access(folder / "tokens"))
    with scripted_worker(lambda r: [started(), chunk("a"), finished()], security) as worker:
        yield worker, files, tokens


def test_tokens_are_passed_on_and_checked_by_the_worker(secure):
    worker, files, tokens = secure

    def post(**headers):
        reply = gateway.http.post(CHAT, json=chat_body(), headers=headers)
        return reply.status_code, reply.json().get("error", {}).get("code")

    with gateway_to(worker.target, worker_ca=files.authority) as gateway:
        assert post(authorization=f"Bearer {tokens['generate']}") == (200, None)
        assert post(authorization="Basic x") == (401, "invalid_api_key")
        assert post() == (401, "invalid_api_key")
        assert gateway.http.get("/readyz").status_code == 200
    with gateway_to(worker.target, worker_ca=files.authority, drop_tokens=True) as gateway:
        assert post(authorization=f"Bearer {tokens['generate']}") == (401, "invalid_api_key")


def test_a_worker_with_another_certificate_gets_no_token(secure, tmp_path):
    worker, _, tokens = secure
    other = certificates.write(tmp_path, certificates.issued(trustme.CA(), "localhost"))
    with gateway_to(worker.target, worker_ca=other.authority) as gateway:
        before = len(worker.worker.requests)
        headers = {"authorization": f"Bearer {tokens['generate']}"}
        reply = gateway.http.post(CHAT, json=chat_body(), headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "grpc_unavailable")
        assert len(worker.worker.requests) == before
        assert gateway.http.get("/readyz").status_code == 503


def test_tokens_do_not_leave_this_machine_in_plain_text():
    with raises(errors.InvalidInput, "TOKENS_OVER_PLAIN_TEXT"):
        open_client(make_settings(GatewaySettings, workers="dns:///worker.example:7071"))


def status_over_tls(gateway, authority, own=None):
    """The status of a request that trusts `authority` and shows the certificate `own`."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if own is not None:
        own.configure_cert(context)
    with httpx.Client(verify=context) as client:
        return client.get(f"{gateway.url}/healthz").status_code


def test_the_gateway_serves_https_with_rotated_certificates(tmp_path):
    first, second = trustme.CA(), trustme.CA()
    files = certificates.mount(tmp_path, certificates.issued(first, "127.0.0.1"))
    expired = second.issue_cert("127.0.0.1", not_after=datetime.now(UTC) - timedelta(days=1))
    with gateway_to("127.0.0.1:1", tls_cert=files.certificate, tls_key=files.key) as gateway:
        assert status_over_tls(gateway, first) == 200
        unusable = {
            certificates.CERTIFICATE: expired.cert_chain_pems[0].bytes(),
            certificates.KEY: expired.private_key_pem.bytes(),
        }
        certificates.mount(tmp_path, unusable)
        assert status_over_tls(gateway, first) == 200
        certificates.mount(tmp_path, certificates.issued(second, "127.0.0.1"))
        assert status_over_tls(gateway, second) == 200
        with pytest.raises(httpx.ConnectError):
            status_over_tls(gateway, first)
        registry = CollectorRegistry()
        registry.register(SecurityCollector(gateway.server.security))
        for result in ("taken", "refused"):
            labels = {"kind": "certificate", "result": result}
            assert registry.get_sample_value("neap_security_reloads_total", labels) == 1


def test_connections_count_before_their_handshake_and_may_not_take_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "MAX_CONNECTIONS", 8)
    authority = trustme.CA()
    files = certificates.write(tmp_path, certificates.issued(authority, "127.0.0.1"))
    with (
        gateway_to("127.0.0.1:1", tls_cert=files.certificate, tls_key=files.key, request_timeout_s=2.0) as gateway,
        ExitStack() as stack,
    ):

        def silent():
            address = ("127.0.0.1", gateway.port)
            return stack.enter_context(socket.create_connection(address, timeout=60, source_address=("127.0.0.2", 0)))

        held = [silent() for _ in range(4)]
        with suppress(ConnectionResetError):
            assert silent().recv(1) == b"", "more than its share"
        assert status_over_tls(gateway, authority) == 200, "somebody else"
        for connection in held:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "the handshake takes too long"
        silent().close()
        assert status_over_tls(gateway, authority) == 200


def test_only_clients_with_a_certificate_can_connect_if_asked_for(tmp_path):
    authority, other = trustme.CA(), trustme.CA()
    files = certificates.mount(tmp_path, certificates.issued(authority, "127.0.0.1"))
    with gateway_to(
        "127.0.0.1:1", tls_cert=files.certificate, tls_key=files.key, tls_client_ca=files.authority
    ) as gateway:
        assert status_over_tls(gateway, authority, authority.issue_cert("ann")) == 200
        for own in (None, other.issue_cert("ann")):
            with pytest.raises(httpx.TransportError):
                status_over_tls(gateway, authority, own)
        certificates.mount(tmp_path, certificates.issued(authority, "127.0.0.1", clients=other))
        assert status_over_tls(gateway, authority, other.issue_cert("ann")) == 200


@pytest.mark.parametrize("setting", ["worker_ca", "worker_cert"])
def test_unusable_files_for_the_workers_are_an_error_at_the_start(tmp_path, setting):
    files = certificates.write(tmp_path, certificates.issued(trustme.CA(), "localhost"))
    (tmp_path / "wrong").write_text("no certificate")
    given = {"worker_key": files.key} if setting == "worker_cert" else {}
    with raises(errors.InvalidInput, "BAD_CERTIFICATE"):
        open_client(make_settings(GatewaySettings, **given, **{setting: tmp_path / "wrong"}))


def test_files_for_the_workers_may_be_rotated(tmp_path):
    authority, other = trustme.CA(), trustme.CA()
    theirs = certificates.write(tmp_path / "worker", certificates.issued(authority, "localhost"))
    ours = certificates.mount(tmp_path / "gateway", certificates.issued(other, "gateway"))
    security = ServerSecurity(ServerCertificate(theirs.certificate, theirs.key, theirs.authority), Access())
    settings = {
        "worker_ca": ours.authority,
        "worker_cert": ours.certificate,
        "worker_key": ours.key,
        "worker_server_name": "localhost",
    }
    script = [started(), chunk("a"), finished()]
    with scripted_worker(lambda request: script, security) as worker, gateway_to(worker.target, **settings) as gateway:

        def status():
            return gateway.http.post(CHAT, json=chat_body()).status_code

        assert status() == 503
        certificates.mount(tmp_path / "gateway", certificates.issued(authority, "gateway"))
        assert status() == 200
        # Files that cannot be used change nothing.
        certificates.mount(tmp_path / "gateway", dict.fromkeys(("tls.crt", "tls.key"), b"half"))
        assert status() == 200
