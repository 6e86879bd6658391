"""Clients that go, do not read, or read slowly."""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress

import openai
import pytest

from neap_engine.gateway import exchange
from neap_engine.gateway.merging import CALLS_AT_ONCE
from shared.errors import Unavailable
from tests.gateways import chat_body, chunk, finished, gateway_to, scripted_worker, started
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"


def asking(gateway, **fields):
    """A connection with a small receive buffer that has sent a request."""
    body = json.dumps(chat_body(**fields)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", gateway.port))
    connection.sendall(head % len(body) + body)
    return connection


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_stream_begins_and_stays_alive_before_the_first_token(scripted, monkeypatch, num_choices):
    worker, gateway = scripted
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.05)
    go_on = threading.Event()

    async def held():
        while not go_on.is_set():
            await asyncio.sleep(0.01)

    worker.script = lambda request: [started(), held(), chunk("a"), held(), finished()]
    body = chat_body(stream=True, n=num_choices)
    with gateway.http.stream("POST", CHAT, json=body) as reply:
        lines = filter(None, reply.iter_lines())
        # On a busy machine a comment comes between two beginnings.
        heads = (line for line in lines if line != ": waiting")
        first = [json.loads(next(heads).removeprefix("data: "))["choices"][0] for _ in range(num_choices)]
        assert [part["delta"] for part in first] == [{"role": "assistant", "content": ""}] * num_choices
        assert {part["neap"]["policy"] for part in first} == {"full"}
        assert [next(lines) for _ in range(3)] == [": waiting"] * 3
        go_on.set()
        *parts, last = [line.removeprefix("data: ") for line in lines if line != ": waiting"]
    assert last == "[DONE]"
    said = [json.loads(part)["choices"][0] for part in parts]
    assert sum("neap" in part for part in said) == num_choices, "only the last parts"
    assert [part["delta"]["content"] for part in said if part["delta"]] == ["a"] * num_choices


def test_many_prompts_are_answered_a_few_at_a_time():
    """lm-eval sends batches of 32, and a worker takes about 80 calls."""
    now, most = 0, 0

    async def alone():
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.2)
        now -= 1

    def script(request):
        return [started(), alone(), chunk(request.text), finished()]

    prompts = [str(index) for index in range(64)]
    with scripted_worker(script) as worker, gateway_to(worker.target) as gateway:
        reply = gateway.http.post("/v1/completions", json={"model": "tiny", "prompt": prompts})
    assert [choice["text"] for choice in reply.json()["choices"]] == prompts
    assert 1 < most <= CALLS_AT_ONCE


def test_a_call_that_is_repeated_before_the_first_token_says_what_runs_in_the_end():
    def script(request):
        num_calls = len(worker.worker.requests)
        yield started(router_version=num_calls)
        if num_calls < 3:
            raise Unavailable("m", reason="SHUTTING_DOWN")
        yield from (chunk("a"), finished())

    with (
        scripted_worker(script) as worker,
        gateway_to(worker.target, num_attempts=3) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        chunks = list(client.chat.completions.create(**chat_body(stream=True)))
    parts = [chunk.choices[0] for chunk in chunks]
    assert [part.delta.role for part in parts if part.delta.role] == ["assistant"]
    assert "".join(part.delta.content or "" for part in parts) == "a"
    versions = [part.model_extra["neap"].get("router_version") for part in parts if "neap" in part.model_extra]
    assert versions == [1, 3, None]


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
    before = gateway.metrics.registry.get_sample_value(
        "neap_gateway_errors_total", {"endpoint": CHAT, "reason": "CLIENT_GONE"}
    )
    with asking(gateway, stream=is_stream, n=num_choices):
        assert all(waiting.acquire(timeout=60) for _ in range(num_choices))
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
    num_before = gateway.server.num_connections
    with asking(gateway, stream=True) as reader:
        assert worker.cancelled.wait(60)
        reason = {"endpoint": CHAT, "reason": "SLOW_READER"}
        sample = gateway.metrics.registry.get_sample_value
        wait_until(lambda: sample("neap_gateway_errors_total", reason))
        # The buffers of gRPC and the kernel are all that was filled.
        assert len(sent) < 1000
        # The connection is not kept for what the client has not read.
        wait_until(lambda: gateway.server.num_connections <= num_before)
        received = b""
        while part := reader.recv(1 << 20):
            received += part
    # The connection ends without the last chunk, so a client knows that the answer is not complete.
    assert not received.endswith(b"0\r\n\r\n")


def test_a_client_that_does_not_read_the_end_of_an_answer_is_cut_off(scripted):
    worker, gateway = scripted
    worker.script = lambda request: [started(), chunk("x" * 3_000_000), finished()]
    num_before = gateway.server.num_connections
    with asking(gateway, stream=False) as reader:
        wait_until(lambda: gateway.server.num_connections > num_before)
        wait_until(lambda: gateway.server.num_connections == num_before)
        received = b""
        with suppress(ConnectionResetError):
            while part := reader.recv(1 << 20):
                received += part
    assert received.count(b"x") < 3_000_000


@pytest.mark.full
def test_a_client_that_reads_slowly_gets_the_whole_of_a_large_answer(scripted):
    worker, gateway = scripted
    worker.script = lambda request: [started(), chunk("x" * 3_000_000), finished()]
    received = 0
    with asking(gateway, stream=False) as reader:
        # Longer than the time for which a client may stop reading.
        while part := reader.recv(32 * 1024):
            received += part.count(b"x")
            time.sleep(0.02)
    assert received > 3_000_000
