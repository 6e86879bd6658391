"""Requests that the gateway refuses itself: they never reach a worker, and the error names the field."""

import json
import reprlib
import socket
import tracemalloc
from contextlib import suppress

import pytest

from neap_engine.gateway.requests import parse_generation
from neap_engine.gateway.responses_schema import ResponsesRequest
from neap_engine.gateway.schema import NEUTRAL, ChatRequest, CompletionRequest
from shared.errors import InvalidInput
from tests.gateways import chat_body, chunk, finished, gateway_to, scripted_worker, started


@pytest.fixture(scope="module")
def worker():
    with scripted_worker(lambda request: [started(), chunk("ab"), finished()]) as state:
        yield state


@pytest.fixture(scope="module")
def gateway(worker):
    with gateway_to(worker.target, max_body_mb=1, max_choices=4) as state:
        yield state


@pytest.fixture(scope="module")
def hasty(worker):
    """For requests that are never whole: on a busy machine, others may take as long."""
    with gateway_to(worker.target, request_timeout_s=0.5) as state:
        yield state


def refused(gateway, body, path="/v1/chat/completions"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = gateway.http.post(path, content=content)
    error = reply.json()["error"]
    assert reply.headers["x-should-retry"] == "false"
    assert error["type"] == "invalid_request_error"
    return reply.status_code, error["neap"]["reason"], error["param"]


TEXT = {"model": "tiny", "prompt": "x"}
ALLOWED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({"neap": {"policy": "full", "x": 1}}, "UNKNOWN_FIELD", "neap.x"),
        ({"stream_options": {"x": 1}, "stream": True}, "UNKNOWN_FIELD", "stream_options.x"),
        ({"presence_penalty": 2.5}, "INVALID_INPUT", "presence_penalty"),
        ({"frequency_penalty": -3}, "INVALID_INPUT", "frequency_penalty"),
        ({"frequency_penalty": False}, "INVALID_INPUT", "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "INVALID_INPUT", "logit_bias"),
        ({"logit_bias": {"x": 1}}, "INVALID_INPUT", "logit_bias.x"),
        ({"logit_bias": {"-1": 1}}, "INVALID_INPUT", "logit_bias"),
        ({"logit_bias": [5]}, "INVALID_INPUT", "logit_bias"),
        ({"bad_words": "x"}, "INVALID_INPUT", "bad_words"),
        ({"bad_words": ["x", ""]}, "INVALID_INPUT", "bad_words[1]"),
        ({"tools": [{"type": "function"}]}, "INVALID_INPUT", "tools[0].function"),
        ({"tool_choice": {"type": "function"}}, "INVALID_INPUT", "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"nam": "f"}}}, "INVALID_INPUT", "tool_choice.function.name"),
        ({"response_format": {"type": "xml"}}, "INVALID_INPUT", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "INVALID_INPUT", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "INVALID_INPUT",
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
            "UNKNOWN_FIELD",
            "response_format.json_schema.shema",
        ),
        ({"functions": [{}]}, "UNSUPPORTED_FIELD", "functions"),
        ({"service_tier": "priority"}, "UNSUPPORTED_FIELD", "service_tier"),
        ({"metadata": "x"}, "UNSUPPORTED_FIELD", "metadata"),
        ({"store": 1}, "UNSUPPORTED_FIELD", "store"),
        ({"min_tokens": -1}, "INVALID_INPUT", "min_tokens"),
        ({"prediction": "x"}, "INVALID_INPUT", "prediction"),
        ({"prediction": {"content": "x"}}, "INVALID_INPUT", "prediction.type"),
        ({"prediction": {"type": "content", "content": 3}}, "INVALID_INPUT", "prediction.content"),
        ({"prediction": {"type": "content", "content": "x", "y": 1}}, "UNKNOWN_FIELD", "prediction.y"),
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "UNSUPPORTED_FIELD", "messages[0].name"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "INVALID_INPUT", "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "INVALID_INPUT", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "INVALID_INPUT",
            "messages[0].content[0].type",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "INVALID_INPUT", "structured_outputs"),
        ({"structured_outputs": {"backend": 1}}, "UNSUPPORTED_FIELD", "structured_outputs.backend"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "INVALID_INPUT",
            "structured_outputs",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [ALLOWED]}}},
            "INVALID_INPUT",
            "tool_choice.allowed_tools.tools",
        ),
        ({"messages": []}, "INVALID_INPUT", "messages"),
        ({"messages": "x"}, "INVALID_INPUT", "messages"),
        ({"model": None}, "INVALID_INPUT", "model"),
        ({"temperature": "1"}, "INVALID_INPUT", "temperature"),
        ({"temperature": True}, "INVALID_INPUT", "temperature"),
        ({"temperature": -1}, "INVALID_INPUT", "temperature"),
        ({"top_p": -0.1}, "INVALID_INPUT", "top_p"),
        ({"max_tokens": 0}, "INVALID_INPUT", "max_tokens"),
        ({"max_tokens": 1.5}, "INVALID_INPUT", "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "INVALID_INPUT", "max_completion_tokens"),
        ({"seed": 2**64}, "INVALID_INPUT", "seed"),
        ({"seed": str(2**64)}, "INVALID_INPUT", "seed"),
        ({"seed": "one"}, "INVALID_INPUT", "seed"),
        ({"seed": ""}, "INVALID_INPUT", "seed"),
        ({"seed": 1.0}, "INVALID_INPUT", "seed"),
        ({"top_k": -2}, "INVALID_INPUT", "top_k"),
        ({"top_k": False}, "INVALID_INPUT", "top_k"),
        ({"stop": ""}, "INVALID_INPUT", "stop"),
        ({"stop": ["a", ""]}, "INVALID_INPUT", "stop[1]"),
        ({"stop": ["a"] * 1025}, "INVALID_INPUT", "stop"),
        ({"top_logprobs": 2}, "INVALID_INPUT", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "INVALID_INPUT", "top_logprobs"),
        ({"neap": {"policy": "fast"}}, "INVALID_INPUT", "neap.policy"),
        ({"neap": {"threshold": 0.9}}, "INVALID_INPUT", "neap.threshold"),
        ({"neap": {"priority": 101}}, "INVALID_INPUT", "neap.priority"),
        ({"neap": {"learn": "always"}}, "INVALID_INPUT", "neap.learn"),
        ({"neap": {"margin": 0.1}}, "INVALID_INPUT", "neap.margin"),
        ({"neap": {"policy": "relaxed", "margin": -1}}, "INVALID_INPUT", "neap.margin"),
        ({"neap": {"policy": "full", "max_drafts": 2}}, "INVALID_INPUT", "neap.max_drafts"),
        ({"neap": {"policy": "relaxed", "max_drafts": 0}}, "INVALID_INPUT", "neap.max_drafts"),
        ({"neap": {"router_version": 1, "router_alias": "a"}}, "INVALID_INPUT", "neap.router_alias"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_fields_are_named(gateway, worker, fields, reason, param):
    before = len(worker.worker.requests)
    assert refused(gateway, chat_body(**fields)) == (400, reason, param)
    assert len(worker.worker.requests) == before


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({"echo": 1}, "INVALID_INPUT", "echo"),
        ({"best_of": 3}, "UNSUPPORTED_FIELD", "best_of"),
        ({"messages": []}, "UNKNOWN_FIELD", "messages"),
        ({"prompt": []}, "INVALID_INPUT", "prompt"),
        ({"prompt": ["x", "y"], "n": 3}, "TOO_MANY_CHOICES", "n"),
        ({"logprobs": 21}, "INVALID_INPUT", "logprobs"),
    ],
    ids=str,
)
def test_wrong_fields_of_completions_are_named(gateway, fields, reason, param):
    status, found, name = refused(gateway, {**TEXT, **fields}, "/v1/completions")
    assert (status, found) == (400, reason)
    assert name.startswith(param)


def test_a_number_that_python_cannot_print_is_refused(gateway):
    body = {**TEXT, "prompt": ["x", "y"], "n": 10**4300 - 1}
    assert refused(gateway, body, "/v1/completions") == (400, "INVALID_INPUT", "n")


@pytest.mark.parametrize("name", [*NEUTRAL, *ChatRequest.model_fields])
def test_null_is_as_good_as_no_field(gateway, name):
    if name not in ("model", "messages"):
        reply = gateway.http.post("/v1/chat/completions", json=chat_body(**{name: None}))
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"temprature": 1}, "temperature"),
        ({"max_new_tokens": 1}, "max_tokens"),
        ({"policy": "full"}, "neap.policy"),
        ({"neap": {"polcy": "full"}}, "neap.policy"),
        ({"stream_options": {"include_usag": True}, "stream": True}, "stream_options.include_usage"),
        ({"zzz": 1}, None),
    ],
    ids=str,
)  # fmt: skip
def test_an_unknown_field_that_looks_like_another_is_a_question(gateway, fields, meant):
    reply = gateway.http.post("/v1/chat/completions", json=chat_body(**fields))
    message = reply.json()["error"]["message"]
    assert message.partition("; did you mean ")[2] == (f"{meant}?" if meant else "")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"x"', b"\xff{}", b'{"model": NaN}', b"[" * 10_000),
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": 0, "temperature": 1}',
        json.dumps({f"field{index}": 0 for index in range(1025)}).encode(),
    ],
    ids=lambda body: str(body[:20]),
)
def test_wrong_json_is_refused(gateway, body):
    assert refused(gateway, body) == (400, "BAD_JSON", None)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"messages": [1] * 100_000}),
        (ChatRequest, {"messages": [{}] * 100_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 100_000}]}),
        (CompletionRequest, {"prompt": [1.5] * 100_000}),
        (CompletionRequest, {"prompt": [[1.5]] * 100_000}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 100_000}),
        (ResponsesRequest, {"input": [1] * 100_000}),
        (ResponsesRequest, {"input": [{}] * 100_000}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{}] * 100_000}]}),
        (ResponsesRequest, {"input": "x", "include": [1] * 100_000}),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else reprlib.repr(given)[:40],
)
def test_a_million_mistakes_cost_no_more_than_one(kind, fields):
    """By the memory that errors take; time would follow it.
    A gateway that checks such a body serves nobody else meanwhile."""
    body = json.dumps({"model": "m", **fields}).encode()
    tracemalloc.start()
    try:
        json.loads(body)
        _, parsed_bytes = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with pytest.raises(InvalidInput):
            parse_generation(body, kind, max_choices=4)
        _, checked_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert checked_bytes < 3 * parsed_bytes


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_that_is_too_large_is_refused_and_its_sender_sees_why(gateway, is_declared):
    parts = [b'{"model": "', *(b"x" * 65_536 for _ in range(32)), b'"}']
    content = b"".join(parts) if is_declared else iter(parts)
    reply = gateway.http.post("/v1/chat/completions", content=content)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    assert gateway.http.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{", b"408", b"REQUEST_TIMEOUT"),
        (b"\x16\x03\x01 no http\r\n\r\n", b"400", b"BAD_HTTP"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
            b"400",
            b"BAD_HTTP",
        ),
    ],
)
def test_half_a_body_and_bytes_that_are_not_http_get_an_error_object(hasty, sent, status, reason):
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))  # until it is closed
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 %s " % status)
    assert reason in answer


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comple"])
def test_a_connection_without_a_request_is_closed(hasty, sent):
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        connection.sendall(sent)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""


PAGE = "https://chat.example.com"


@pytest.mark.parametrize(
    ("origin", "allowed", "may_post", "is_told"),
    [
        (None, (), True, False),
        ("http://{host}", (), True, False),
        (PAGE, (), False, False),
        ("null", (), False, False),
        (PAGE, (PAGE,), True, True),
        (PAGE, ("*",), True, True),
        ("https://other.example.com", (PAGE,), False, False),
    ],
)
def test_pages_of_other_hosts_need_a_setting(worker, origin, allowed, may_post, is_told):
    with gateway_to(worker.target, cors_origins=allowed) as gateway:
        headers = {} if origin is None else {"origin": origin.format(host=f"127.0.0.1:{gateway.port}")}
        before = len(worker.worker.requests)
        # A body of plain text is one that a browser sends without asking.
        plain = {**headers, "content-type": "text/plain"}
        reply = gateway.http.post("/v1/completions", content=json.dumps(TEXT), headers=plain)
        assert reply.status_code == (200 if may_post else 403), reply.text
        assert may_post or reply.json()["error"]["neap"]["reason"] == "ORIGIN_NOT_ALLOWED"
        assert len(worker.worker.requests) == before + may_post
        assert ("access-control-allow-origin" in reply.headers) == is_told
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "x-stainless-os"}
        asked = gateway.http.options("/v1/chat/completions", headers={**headers, **wanted})
        assert (asked.status_code == 200) == is_told
        assert not is_told or "x-stainless-os" in asked.headers["access-control-allow-headers"]
        assert gateway.http.get("/v1/models", headers=headers).status_code == 200


def test_connections_stay_open_as_long_as_is_set(worker):
    with gateway_to(worker.target, idle_timeout_s=1234) as gateway:
        assert gateway.server._server.config.timeout_keep_alive == 1234


def test_probes_of_other_servers_are_answered(gateway):
    assert gateway.http.get("/health").status_code == 200
    assert set(gateway.http.get("/version").json()) == {"version"}
