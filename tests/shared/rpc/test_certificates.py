"""TLS and mutual TLS over real connections on loopback, with files that are rotated while the server runs."""

import datetime

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from neap_client import ClientSecurity, NeapClient
from neap_client.inference.v1 import inference_pb2
from structlog.testing import capture_logs

from shared.errors import InvalidInput, Unavailable
from shared.pool_names import ANY_POOL
from shared.rpc.callers import Role, current_caller
from shared.rpc.certificates import ServerCertificate
from shared.rpc.security import ServerSecurity
from tests.certificates import issued, mount, write
from tests.reasons import raises
from tests.shared.rpc.conftest import running

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def other():
    return trustme.CA()


def _security(files, *, mutual=False):
    return ServerSecurity(ServerCertificate(files.certificate, files.key, files.authority if mutual else None))


def _client(server, **security):
    return NeapClient(server.target, num_attempts=1, security=ClientSecurity(**security))


def _reaches(server, **security):
    with _client(server, **security) as client:
        try:
            client.get_model("tiny")
        except Unavailable:
            return False
    return True


def _files(tmp_path, name, *args, **kwargs):
    return write(tmp_path / name, issued(*args, **kwargs))


def test_tls_accepts_clients_that_trust_it_and_no_plain_text(scripted, tmp_path, authority, other):
    files = _files(tmp_path, "server", authority, HOST)
    stranger = _files(tmp_path, "other", other, HOST)
    with running(scripted, security=_security(files)) as server:
        assert _reaches(server, ca=files.authority)
        assert not _reaches(server, ca=stranger.authority)
        assert not _reaches(server, tls=True)  # the machine's own authorities
        assert not _reaches(server)
    assert scripted.num_calls == 1


def test_a_certificate_for_another_name_needs_the_name(scripted, tmp_path, authority):
    files = _files(tmp_path, "server", authority, "neap-worker.example")
    with running(scripted, security=_security(files)) as server:
        assert not _reaches(server, ca=files.authority)
        assert _reaches(server, ca=files.authority, server_name="neap-worker.example")


def test_mutual_tls_wants_a_certificate_of_the_right_authority_and_names_the_caller(
    scripted, tmp_path, authority, other
):
    files = _files(tmp_path, "server", authority, HOST)
    ann = _files(tmp_path, "ann", authority, "ann@example.org")
    eve = _files(tmp_path, "eve", other, "ann@example.org")
    callers = []
    scripted.on_get_model = lambda request, context: callers.append(current_caller())
    with running(scripted, security=_security(files, mutual=True)) as server:
        assert _reaches(server, ca=files.authority, certificate=ann.certificate, key=ann.key)
        assert not _reaches(server, ca=files.authority)
        assert not _reaches(server, ca=files.authority, certificate=eve.certificate, key=eve.key)
    (caller,) = callers
    assert caller.name == "certificate:ann@example.org"
    assert caller.roles == set(Role)
    assert caller.pool == ANY_POOL


def test_a_mounted_secret_that_is_swapped_holds_for_new_connections(scripted, tmp_path, authority, other):
    old, new = issued(authority, HOST), issued(other, HOST)
    files = mount(tmp_path / "secret", old)
    trusts = {name: write(tmp_path / name, c).authority for name, c in (("old", old), ("new", new))}
    security = _security(files)
    with running(scripted, security=security) as server, _client(server, ca=trusts["old"]) as early:
        early.get_model("tiny")
        expiry_time_s = security.certificate.expiry_time_s
        mount(tmp_path / "secret", new)
        with capture_logs() as logs:
            assert _reaches(server, ca=trusts["new"])
        assert not _reaches(server, ca=trusts["old"])
        early.get_model("tiny")  # its connection was opened before the rotation
    assert [line["event"] for line in logs if "certificate" in line["event"]] == ["certificate reloaded"]
    assert (security.certificate.files.num_reloads, security.certificate.files.num_refused) == (1, 0)
    assert security.certificate.expiry_time_s == expiry_time_s  # trustme's are all alike


def test_the_clients_authority_is_rotated_too(scripted, tmp_path, authority, other):
    server_files = issued(authority, HOST)
    files = mount(tmp_path / "secret", server_files)
    eve = _files(tmp_path, "eve", other, "eve@example.org")
    with running(scripted, security=_security(files, mutual=True)) as server:
        mine = {"ca": write(tmp_path / "trust", server_files).authority}
        assert not _reaches(server, **mine, certificate=eve.certificate, key=eve.key)
        mount(tmp_path / "secret", {**server_files, "ca.crt": other.cert_pem.bytes()})
        assert _reaches(server, **mine, certificate=eve.certificate, key=eve.key)


def _cut(data):
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda old, new: {"tls.crt": new["tls.crt"]},  # the key has not been replaced yet
        lambda old, new: {"tls.key": new["tls.key"]},
        lambda old, new: {"tls.crt": _cut(new["tls.crt"]), "tls.key": new["tls.key"]},
        lambda old, new: {"tls.crt": new["tls.crt"], "tls.key": _cut(new["tls.key"])},
        lambda old, new: {"ca.crt": b""},
        lambda old, new: {"tls.key": None},
    ],
    ids=["certificate", "key", "half-certificate", "half-key", "no-authority", "no-key"],
)
def test_files_that_do_not_match_leave_the_old_certificate_in_use(scripted, tmp_path, authority, damage):
    old, new = issued(authority, HOST), issued(authority, HOST)
    files = write(tmp_path / "server", old)
    trust = write(tmp_path / "trust", old)
    ann = _files(tmp_path, "ann", authority, "ann@example.org")
    identity = {"ca": trust.authority, "certificate": ann.certificate, "key": ann.key}
    security = _security(files, mutual=True)
    counts = security.certificate.files
    with running(scripted, security=security) as server, capture_logs() as logs:
        for name, data in damage(old, new).items():
            path = files.certificate.with_name(name)
            path.unlink() if data is None else path.write_bytes(data)
        assert _reaches(server, **identity)
        assert _reaches(server, **identity)
        assert (counts.num_reloads, counts.num_refused) == (0, 1)  # counted once, however often it is read
        write(tmp_path / "server", new)
        assert _reaches(server, **identity)
        assert (counts.num_reloads, counts.num_refused) == (1, 1)
    (line,) = [line for line in logs if line["event"] == "certificate not reloaded"]
    assert str(tmp_path) in line["why"]
    assert "PRIVATE" not in str(logs)


def _encrypted(key):
    encryption = BestAvailableEncryption(b"x")
    return load_pem_private_key(key, None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: {"tls.crt": b"nonsense"}, "no complete certificate"),
        (lambda files: {"tls.key": b"nonsense"}, "no private key"),
        (lambda files: {"tls.key": files["tls.crt"]}, "no private key"),
        (lambda files: {"tls.key": _encrypted(files["tls.key"])}, "encrypted"),
        (lambda files: {"tls.key": issued(trustme.CA(), HOST)["tls.key"]}, "not the key"),
        (lambda files: {"ca.crt": b"-----BEGIN CERTIFICATE-----\nAAAA"}, "no complete certificate"),
        (lambda files: {"ca.crt": b"\n" * (1 << 21)}, "larger"),
    ],
)
def test_unusable_files_at_the_start_are_an_error(tmp_path, authority, change, said):
    contents = issued(authority, HOST)
    with pytest.raises(InvalidInput, match=said) as caught:
        _security(write(tmp_path, {**contents, **change(contents)}), mutual=True)
    assert caught.value.reason in ("BAD_CERTIFICATE", "BAD_CONFIGURATION")


def test_an_expired_certificate_and_a_missing_file_are_errors_at_the_start(tmp_path, authority):
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    leaf = authority.issue_cert(HOST, not_after=yesterday)
    files = write(tmp_path, issued(authority, HOST))
    files.certificate.write_bytes(leaf.cert_chain_pems[0].bytes())
    files.key.write_bytes(leaf.private_key_pem.bytes())
    with raises(InvalidInput, "BAD_CERTIFICATE", match="expired"):
        _security(files)
    files.key.unlink()
    with raises(InvalidInput, "BAD_CONFIGURATION", match=str(files.key)):
        _security(files)


def test_streams_go_over_tls(scripted, tmp_path, authority):
    async def generate(request, context):
        for number in range(3):
            yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text=str(number)))

    scripted.on_generate = generate
    files = _files(tmp_path, "server", authority, HOST)
    with running(scripted, security=_security(files)) as server, _client(server, ca=files.authority) as client:
        stream = client.generate(inference_pb2.GenerateRequest())
        assert [event.chunk.text for event in stream] == ["0", "1", "2"]
