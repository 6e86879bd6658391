"""What an HTTP client sees of errors and ends of workers."""

import asyncio
import json
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
import trustme

from shared import errors
from shared.config import make_settings
from shared.errors import NeapError
from shared.gateway.errors import STATUSES
from shared.gateway.workers import Workers
from shared.gateway_settings import GatewaySettings
from shared.rpc.access import Access
from shared.rpc.certificates import ServerCertificate
from shared.rpc.security import ServerSecurity
from shared.rpc.status import CODES
from tests import certificates
from tests.gateways import chat_body, chunk, finished, gateway_to, scripted_worker, started
from tests.servers import free_ports
from tests.tokens import write_tokens
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
EVERY_ERROR = [
    (errors.InvalidInput("m", reason="MAX_TOKENS_TOO_LARGE"), 400, "invalid_request_error", "max_tokens_too_large"),
    (errors.PromptTooLong("m"), 400, "invalid_request_error", "context_length_exceeded"),
    (errors.PreconditionFailed("m", reason="ROUTER_REQUIRED"), 400, "invalid_request_error", "router_required"),
    (errors.Unauthenticated("m", reason="TOKEN_UNKNOWN"), 401, "authentication_error", "invalid_api_key"),
    (errors.PermissionDenied("m", reason="ROLE_MISSING"), 403, "permission_error", "role_missing"),
    (errors.NotFound("m", reason="MODEL_NOT_FOUND"), 404, "invalid_request_error", "model_not_found"),
    (errors.AlreadyExists("m"), 409, "invalid_request_error", "already_exists"),
    (errors.Conflict("m"), 409, "invalid_request_error", "conflict"),
    (errors.Exhausted("m", reason="QUEUE_FULL", retry_after_s=1.5), 429, "rate_limit_error", "queue_full"),
    (errors.Exhausted("m", reason="KV_BUDGET"), 429, "rate_limit_error", "kv_budget"),
    (errors.Cancelled("m"), 499, "invalid_request_error", "cancelled"),
    (errors.Corrupt("m"), 500, "server_error", "corrupt"),
    (ValueError("secret"), 500, "server_error", "internal"),
    (errors.Unavailable("m", reason="ENGINE_FAILED"), 503, "server_error", "engine_failed"),
    (errors.DeadlineExceeded("m"), 504, "server_error", "deadline_exceeded"),
]  # fmt: skip


def failing(error, *events):
    def script(request):
        yield from events
        raise error

    return script


@pytest.fixture(scope="module")
def scripted():
    """A worker whose script a test sets, and a gateway to it."""
    with (
        scripted_worker(lambda request: [started(), finished()]) as state,
        gateway_to(state.target, stall_timeout_s=0.5) as gateway,
    ):
        yield state.worker, gateway


@pytest.mark.parametrize(("error", "status", "kind", "code"), EVERY_ERROR, ids=str)
def test_every_error_of_a_worker_has_its_status(scripted, error, status, kind, code):
    worker, gateway = scripted
    worker.script = failing(error)
    reply = gateway.http.post(CHAT, json=chat_body())
    found = reply.json()["error"]
    assert (reply.status_code, found["type"], found["code"]) == (status, kind, code)
    assert "secret" not in reply.text
    if isinstance(error, NeapError):
        assert found["neap"]["reason"] == error.reason
        assert found["message"] == "m"
    waits = isinstance(error, errors.Unavailable) or getattr(error, "retry_after_s", None)
    assert ("retry-after" in reply.headers) == bool(waits)
    if status == 401:
        assert reply.headers["www-authenticate"] == "Bearer"


def test_a_retry_delay_is_rounded_up_to_seconds(scripted):
    worker, gateway = scripted
    worker.script = failing(errors.Exhausted("m", retry_after_s=1.5))
    reply = gateway.http.post(CHAT, json=chat_body())
    assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("2", "1500")


def test_the_table_has_every_grpc_code_that_a_worker_can_send():
    assert set(CODES.values()) <= set(STATUSES)


def stream_lines(gateway, **fields):
    with gateway.http.stream("POST", CHAT, json=chat_body(stream=True, **fields)) as reply:
        assert reply.status_code == 200
        return [line.removeprefix("data: ") for line in reply.iter_lines() if line]


def test_an_error_after_the_first_token_is_the_last_event_of_the_stream(scripted):
    worker, gateway = scripted
    worker.script = failing(errors.Unavailable("m", reason="ENGINE_FAILED"), started(), chunk("a"))
    *_, text, last = stream_lines(gateway)
    assert json.loads(text)["choices"][0]["delta"] == {"content": "a"}
    error = json.loads(last)["error"]
    assert (error["code"], error["type"]) == ("engine_failed", "server_error")


def test_an_answer_without_an_end_is_no_success(scripted):
    worker, gateway = scripted
    worker.script = lambda request: [started(), chunk("a")]
    reply = gateway.http.post(CHAT, json=chat_body())
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "incomplete_answer")
    assert json.loads(stream_lines(gateway)[-1])["error"]["code"] == "incomplete_answer"


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_calls_are_cancelled_when_the_client_goes(scripted, is_stream, num_choices):
    worker, gateway = scripted
    waiting = threading.Semaphore(0)

    async def never():
        waiting.release()
        await asyncio.Event().wait()

    worker.script = lambda request: [started(), chunk("a"), never()]
    worker.cancelled.clear()
    body = chat_body(stream=is_stream, n=num_choices)
    before = gateway.metrics.registry.get_sample_value(
        "neap_gateway_errors_total", {"endpoint": CHAT, "reason": "CLIENT_GONE"}
    )
    url = f"{gateway.url}{CHAT}"
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", url, json=body, timeout=0.5) as reply,
    ):
        list(reply.iter_lines())
    assert waiting.acquire(timeout=60)
    assert worker.cancelled.wait(60)
    wait_until(
        lambda: (
            gateway.metrics.registry.get_sample_value(
                "neap_gateway_errors_total", {"endpoint": CHAT, "reason": "CLIENT_GONE"}
            )
            == (before or 0) + 1
        )
    )
    assert gateway.gateway.num_running == 0


def test_a_client_that_does_not_read_is_cut_off_and_its_call_cancelled(scripted):
    worker, gateway = scripted
    worker.cancelled.clear()
    sent = []

    def endless(request):
        yield started()
        while True:
            sent.append(1)
            yield chunk("x" * 10_000)

    worker.script = endless
    body = json.dumps(chat_body(stream=True)).encode()
    num_before = gateway.server.num_connections
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        reader.connect(("127.0.0.1", gateway.port))
        reader.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        assert worker.cancelled.wait(60)
        reason = {"endpoint": CHAT, "reason": "SLOW_READER"}
        sample = gateway.metrics.registry.get_sample_value
        wait_until(lambda: sample("neap_gateway_errors_total", reason))
        # The buffers of gRPC and the kernel are all that was filled.
        assert len(sent) < 1000
        # The connection is not kept for what the client has not read.
        wait_until(lambda: gateway.server.num_connections <= num_before)
        reader.settimeout(60)
        received = b""
        while part := reader.recv(1 << 20):
            received += part
    # The connection ends without the last chunk, so a client knows that the answer is not complete.
    assert not received.endswith(b"0\r\n\r\n")


def test_without_workers_a_request_fails_and_readiness_says_so():
    (port,) = free_ports(1)
    with gateway_to(f"127.0.0.1:{port}") as gateway:
        reply = gateway.http.post(CHAT, json=chat_body())
        error = reply.json()["error"]
        assert (reply.status_code, error["neap"]["reason"]) == (503, "GRPC_UNAVAILABLE")
        assert str(port) not in reply.text
        assert reply.headers["retry-after"] == "1"
        assert gateway.http.get("/v1/models").status_code == 503
        assert gateway.http.get("/readyz").status_code == 503
        assert gateway.http.get("/healthz").status_code == 200


def test_readiness_follows_a_worker(scripted):
    assert scripted[1].http.get("/readyz").status_code == 200


def test_a_call_that_reaches_no_worker_is_repeated_before_its_first_token():
    def unready(request):
        if len(worker.worker.requests) < 3:
            raise errors.Unavailable("m", reason="SHUTTING_DOWN")
        return [started(), chunk("a"), finished()]

    with scripted_worker(unready) as worker, gateway_to(worker.target, num_attempts=3) as gateway:
        assert gateway.http.post(CHAT, json=chat_body()).status_code == 200
        assert len({call["x-request-id"] for call in worker.worker.metadata}) == 1
        worker.worker.script = failing(errors.Unavailable("m"), started(), chunk("a"))
        worker.worker.requests.clear()
        assert gateway.http.post(CHAT, json=chat_body()).status_code == 503
        assert len(worker.worker.requests) == 1


def test_the_clients_trace_and_request_id_reach_the_worker(scripted):
    worker, gateway = scripted
    worker.script = lambda request: [started(), chunk("a"), finished()]
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x-request-id": "mine-1"}
    reply = gateway.http.post(CHAT, json=chat_body(), headers=headers)
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.json()["id"] == "chatcmpl-mine-1"
    assert worker.metadata[-1]["x-request-id"] == "mine-1"
    assert trace in worker.metadata[-1]["traceparent"]


def test_a_target_that_is_no_worker_is_a_bad_gateway():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with gateway_to(f"127.0.0.1:{port}") as gateway:
        reply = gateway.http.get("/v1/models")
    server.stop(None).wait()
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "grpc_unimplemented")


def test_a_slow_generation_ends_at_the_deadline():
    async def never():
        await asyncio.Event().wait()

    with (
        scripted_worker(lambda request: [started(), never()]) as worker,
        gateway_to(worker.target, generation_timeout_s=0.3) as gateway,
    ):
        assert gateway.http.post(CHAT, json=chat_body()).status_code == 504


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    """A worker with TLS that asks for tokens."""
    folder = tmp_path_factory.mktemp("secure")
    authority = trustme.CA()
    files = certificates.write(folder, certificates.issued(authority, "localhost", "127.0.0.1"))
    tokens = write_tokens(folder / "tokens")
    security = ServerSecurity(
        ServerCertificate(files.certificate, files.key), Access(folder / "tokens")
    )
    with scripted_worker(lambda r: [started(), chunk("a"), finished()], security) as worker:
        yield worker, files, tokens


def test_tokens_are_passed_on_and_checked_by_the_worker(secure):
    worker, files, tokens = secure

    def post(**headers):
        reply = gateway.http.post(CHAT, json=chat_body(), headers=headers)
        return reply.status_code, reply.json().get("error", {}).get("code")

    with gateway_to(worker.target, worker_ca=files.authority) as gateway:
        assert post(authorization=f"Bearer {tokens['generate']}") == (200, None)
        assert post(authorization=f"Bearer {tokens['calibrate']}") == (403, "role_missing")
        assert post(authorization="Bearer neap_nobody") == (401, "invalid_api_key")
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
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, "no worker answers")
        assert len(worker.worker.requests) == before
        assert gateway.http.get("/readyz").status_code == 503


def test_tokens_do_not_leave_this_machine_in_plain_text():
    with pytest.raises(errors.InvalidInput) as caught:
        Workers(make_settings(GatewaySettings, workers="dns:///worker.example:7071"))
    assert caught.value.reason == "TOKENS_OVER_PLAIN_TEXT"


def test_the_gateway_serves_https_with_rotated_certificates(scripted, tmp_path):
    worker, _ = scripted
    worker.script = lambda request: [started(), chunk("a"), finished()]
    first, second = trustme.CA(), trustme.CA()
    files = certificates.mount(tmp_path, certificates.issued(first, "127.0.0.1"))

    def get(authority):
        context = ssl.create_default_context()
        authority.configure_trust(context)
        with httpx.Client(verify=context) as client:
            return client.get(f"{gateway.url}/healthz").status_code

    with gateway_to("127.0.0.1:1", tls_cert=files.certificate, tls_key=files.key) as gateway:
        assert get(first) == 200
        certificates.mount(tmp_path, certificates.issued(second, "127.0.0.1"))
        assert get(second) == 200
        with pytest.raises(httpx.ConnectError):
            get(first)
