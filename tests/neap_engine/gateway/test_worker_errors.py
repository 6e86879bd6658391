"""What an HTTP client sees of errors and ends of workers."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from neap_client.status import CODES

from neap_engine.gateway.errors import STATUSES
from shared import errors
from shared.errors import NeapError
from tests.gateways import chat_body, chunk, finished, gateway_to, scripted_worker, started
from tests.servers import free_ports

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


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_choice_that_fails_ends_all(scripted, is_stream):
    worker, gateway = scripted

    async def never():
        await asyncio.Event().wait()

    def script(request):
        yield started()
        if request.sampling.seed == 6:
            raise errors.Unavailable("m", reason="ENGINE_FAILED")
        yield chunk("a")
        yield never()

    worker.script = script
    worker.cancelled.clear()
    body = chat_body(stream=is_stream, n=3, seed=5)
    reply = gateway.http.post(CHAT, json=body).text.split("data: ")[-1]
    assert json.loads(reply)["error"]["code"] == "engine_failed"
    assert worker.cancelled.wait(60)


def test_an_answer_without_an_end_is_no_success(scripted):
    worker, gateway = scripted
    worker.script = lambda request: [started(), chunk("a")]
    reply = gateway.http.post(CHAT, json=chat_body())
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "incomplete_answer")
    assert json.loads(stream_lines(gateway)[-1])["error"]["code"] == "incomplete_answer"


def test_without_workers_a_request_fails_and_readiness_says_so():
    (port,) = free_ports(1)
    with gateway_to(f"127.0.0.1:{port}") as gateway:
        reply = gateway.http.post(CHAT, json=chat_body())
        error = reply.json()["error"]
        assert (reply.status_code, error["neap"]["reason"]) == (503, "GRPC_UNAVAILABLE")
        assert str(port) not in reply.text
        assert reply.headers["retry-after"] == "1"
        assert gateway.http.get("/v1/models").status_code == 503
        assert gateway.http.get("/readyz").status_code == gateway.http.get("/health").status_code == 503
        assert gateway.http.get("/healthz").status_code == 200


def test_a_worker_that_drains_gets_no_calls_and_readiness_does_not_waver():
    script = failing(errors.Unavailable("m", reason="SHUTTING_DOWN"))
    good = [started(), chunk("a"), finished()]
    with scripted_worker(script) as draining, scripted_worker(lambda request: good) as worker:
        draining.drain()
        with gateway_to(f"ipv4:{draining.target},{worker.target}") as gateway:
            for _ in range(6):
                assert gateway.http.get("/readyz").status_code == 200
                assert gateway.http.post(CHAT, json=chat_body()).status_code == 200
        assert draining.worker.requests == []


def test_a_call_that_reaches_no_worker_is_repeated_before_its_first_token():
    def unready(request):
        if len(worker.worker.requests) < 3:
            raise errors.Unavailable("m", reason="SHUTTING_DOWN")
        return [started(), chunk("a"), finished()]

    with scripted_worker(unready) as worker, gateway_to(worker.target, num_attempts=3) as gateway:
        assert gateway.http.post(CHAT, json=chat_body()).status_code == 200
        assert len({call["x-request-id"] for call in worker.worker.metadata}) == 1
        worker.worker.script = failing(errors.Unavailable("m"))
        worker.worker.requests.clear()
        assert gateway.http.post(CHAT, json=chat_body()).status_code == 503
        assert len(worker.worker.requests) == 3
        # The client is told to wait.
        worker.worker.script = failing(errors.Exhausted("m", retry_after_s=0.01))
        worker.worker.requests.clear()
        assert gateway.http.post(CHAT, json=chat_body()).status_code == 429
        assert len(worker.worker.requests) == 1


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_that_a_worker_interrupts_is_resumed(is_stream):
    def interrupted(request):
        num_resumed = len(request.resume.token_ids)
        yield started(num_resumed_tokens=num_resumed, continued_inexactly=bool(num_resumed))
        yield chunk("ab"[num_resumed])
        if not num_resumed:
            raise errors.Unavailable("m", reason="HANDED_OVER")
        yield finished()

    with scripted_worker(interrupted) as worker, gateway_to(worker.target, num_attempts=3) as gateway:
        reply = gateway.http.post(CHAT, json=chat_body(stream=is_stream))
        assert reply.status_code == 200
        assert "error" not in reply.text
        if is_stream:
            parts = [line.removeprefix("data: ") for line in reply.text.split("\n\n")]
            assert parts.count("[DONE]") == 1
            deltas = [json.loads(part)["choices"][0]["delta"] for part in parts if "delta" in part]
            assert "".join(delta.get("content", "") for delta in deltas) == "ab"
        else:
            assert reply.json()["choices"][0]["message"]["content"] == "ab"
        assert len(worker.worker.requests) == 2
        assert len({call["x-request-id"] for call in worker.worker.metadata}) == 1
        value = gateway.metrics.registry.get_sample_value("neap_gateway_resumptions_total")
        assert value == 1
        last = json.loads(parts[-3]) if is_stream else reply.json()
        neap = last["choices"][0]["neap"]
        assert neap["resumptions"] == [{"token": 1, "inexact": True}]


def test_the_gateway_may_do_without_other_tokens():
    def interrupted(request):
        assert request.resume.only_exactly == bool(request.resume.token_ids)
        if request.resume.token_ids:
            raise errors.PreconditionFailed("m", reason="NUMERICS_DIFFER")
        yield started()
        yield chunk("a")
        raise errors.Unavailable("m", reason="SHUTTING_DOWN")

    flags = {"num_attempts": 3, "resumes": "exactly"}
    with scripted_worker(interrupted) as worker, gateway_to(worker.target, **flags) as gateway:
        reply = gateway.http.post(CHAT, json=chat_body())
        assert (reply.status_code, reply.json()["error"]["neap"]["reason"]) == (400, "NUMERICS_DIFFER")


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
