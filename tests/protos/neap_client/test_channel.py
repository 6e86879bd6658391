"""To which targets a client sends its token."""

import pytest
from neap_client import NeapClient
from neap_client.addresses import is_loopback_target
from neap_client.channel import ClientSecurity, open_channel
from structlog.testing import capture_logs

from shared.config import make_settings
from shared.errors import InvalidInput, Unauthenticated
from shared.rpc.access import Access
from shared.rpc.security import ServerSecurity, open_security
from shared.worker_settings import WorkerSettings
from tests.reasons import raises
from tests.shared.rpc.conftest import running
from tests.tokens import write_tokens

HERE = "127.0.0.1:1 localhost:1 [::1]:1 ipv4:127.0.0.1:1,127.0.0.2:2 ipv6:[::1]:1 dns:///localhost:1 dns:localhost:1"
HERE += " unix:/tmp/x unix:///tmp/x 127.0.0.1"
ELSEWHERE = "10.0.0.7:1 worker:1 ipv4:127.0.0.1:1,10.0.0.7:1 localhost.example.org:1 127.0.0.1.example.org:1 0.0.0.0:1"
ELSEWHERE += " [::]:1 dns://8.8.8.8/localhost:1 xds:///a https://localhost:1 127.1:1 vsock:1:1 :1"


@pytest.mark.parametrize("target", HERE.split())
def test_targets_on_this_machine(target):
    assert is_loopback_target(target)


@pytest.mark.parametrize("target", ELSEWHERE.split())
def test_targets_that_may_be_elsewhere(target):
    assert not is_loopback_target(target)


def test_a_token_does_not_leave_this_machine_in_plain_text(tmp_path):
    file = tmp_path / "token"
    file.write_text("neap_secret\n")
    for security in (ClientSecurity(token="neap_secret"), ClientSecurity(token_file=file)):
        with raises(InvalidInput, "TOKEN_OVER_PLAIN_TEXT") as caught:
            open_channel("worker:7071", security)
        assert "secret" not in str(caught.value) + repr(security)
    open_channel("worker:7071", ClientSecurity(token="x", allow_plaintext_token=True)).close()
    open_channel("worker:7071", ClientSecurity(token="x", tls=True)).close()
    open_channel("worker:7071", ClientSecurity()).close()


@pytest.mark.parametrize("token", ["a b", "a\nb", "tökén", "a\x00"])
def test_a_token_that_no_header_can_hold_is_an_error(token):
    with raises(InvalidInput, "BAD_TOKEN") as caught:
        open_channel("127.0.0.1:1", ClientSecurity(token=token))
    assert token not in str(caught.value)


def test_files_that_cannot_be_read_are_errors(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    for security in (
        ClientSecurity(ca=tmp_path / "none"),
        ClientSecurity(token_file=tmp_path / "none"),
        ClientSecurity(token_file=empty),
    ):
        with pytest.raises(InvalidInput, match=str(tmp_path)):
            open_channel("127.0.0.1:1", security)


def test_a_client_sends_its_token_and_uses_a_rotated_one(scripted, tmp_path):
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    mine.write_text(write_tokens(tokens)["generate"] + "\n")
    with (
        running(scripted, security=ServerSecurity(access=Access(tokens))) as server,
        NeapClient(server.target, security=ClientSecurity(token_file=mine)) as client,
        NeapClient(server.target) as stranger,
    ):
        client.get_model("tiny")
        mine.write_text(write_tokens(tokens)["generate"])
        client.get_model("tiny")
        with raises(Unauthenticated, "TOKEN_MISSING"):
            stranger.get_model("tiny")
    assert scripted.num_calls == 2


def _opened(listen, **given):
    with capture_logs() as logs:
        open_security(make_settings(WorkerSettings, listen=listen, **given), listen)
    return [line["event"] for line in logs]


def test_a_service_does_not_take_tokens_in_plain_text_beyond_loopback(tmp_path):
    file = tmp_path / "tokens"
    write_tokens(file)
    assert _opened("127.0.0.1:0", auth_tokens=file) == []
    assert _opened("[::1]:0", auth_tokens=file) == []
    for listen in ("0.0.0.0:0", "[::]:0", "worker:0"):
        with raises(InvalidInput, "TOKENS_OVER_PLAIN_TEXT"):
            _opened(listen, auth_tokens=file)
        allowed = _opened(listen, auth_tokens=file, allow_plaintext_tokens=True)
        assert allowed == ["listening without TLS beyond loopback"]
    assert "anyone who reaches this address may call everything" in _opened("0.0.0.0:0")
    assert _opened("127.0.0.1:0") == []


@pytest.mark.parametrize("given", [{"tls_cert": "/x"}, {"tls_key": "/x"}, {"tls_client_ca": "/x"}], ids=str)
def test_incomplete_configurations_are_refused(given):
    with raises(InvalidInput, "BAD_CONFIGURATION"):
        make_settings(WorkerSettings, **given)


def test_empty_variables_are_off(monkeypatch):
    for name in ("TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "AUTH_TOKENS", "WORKER_HEALTH_LISTEN"):
        monkeypatch.setenv(f"NEAP_{name}", "")
    settings = make_settings(WorkerSettings)
    assert (settings.tls_cert, settings.auth_tokens, settings.health_listen) == (None, None, "")


def test_a_registrys_password_is_not_in_what_settings_print():
    settings = make_settings(WorkerSettings, registry="redis://u:hunter2@h/0?objects=s3://b/p")
    assert "hunter2" not in repr(settings) + str(settings)
