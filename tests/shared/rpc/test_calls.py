"""Calls whose client sends no request or does not read."""

import asyncio
import threading
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc
from structlog.testing import capture_logs

from shared.errors import DeadlineExceeded, Exhausted, InvalidInput, Unavailable
from shared.rpc.calls import ClientWaits
from tests.shared.rpc.conftest import SERVICE, ended, pass_time, running
from tests.waiting import wait_until

METHODS = [
    f"/{SERVICE}/Generate",
    f"/{SERVICE}/GetModel",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]


@contextmanager
def opened(server, methods, *, half_closed=False):
    """Start calls of `methods` that send no message, and wait until they have begun on the server."""
    never = threading.Event()

    def messages():
        if not half_closed:
            never.wait(60)
        return
        yield

    with grpc.insecure_channel(server.target) as channel:
        calls = [channel.stream_stream(method)(messages()) for method in methods]
        try:
            yield calls
        finally:
            never.set()


def test_calls_without_a_request_end_at_once_when_the_server_drains(server):
    with opened(server, METHODS) as calls:
        wait_until(lambda: server.server.waits.num_awaited == len(METHODS))
        server.server.grace_s, server.server.drain_timeout_s = 0.0, 300.0
        draining = asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop)
        assert [ended(call) for call in calls] == [(Unavailable, "SHUTTING_DOWN")] * len(calls)
        draining.result(60)
    assert server.server.waits.unsent == {"SHUTTING_DOWN": len(METHODS)}


def test_a_request_on_its_way_is_served_within_the_grace(scripted, server):
    server.server.grace_s = 300.0
    send = threading.Event()

    def late():
        send.wait(60)
        yield inference_pb2.GetModelRequest().SerializeToString()

    with grpc.insecure_channel(server.target) as channel:
        draining = asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop)
        reply = channel.stream_unary(METHODS[1]).future(late())
        wait_until(lambda: server.server.waits.num_awaited == 1)
        send.set()
        assert reply.result(60) == b""
        for _ in range(2):
            server.loop.call_soon_threadsafe(server.server.request_stop)
        draining.result(60)


@pytest.mark.parametrize("method", METHODS)
def test_the_wait_for_a_request_that_never_arrives_is_bounded(scripted, method):
    with (
        running(scripted, request_timeout_s=0.2) as server,
        capture_logs() as logs,
        opened(server, [method]) as (call,),
    ):
        assert ended(call) == (DeadlineExceeded, "REQUEST_TIMEOUT")
        assert server.server.waits.unsent == {"REQUEST_TIMEOUT": 1}
        wait_until(lambda: logs)
    assert (logs[-1]["method"], logs[-1]["reason"]) == (method, "REQUEST_TIMEOUT")


@pytest.mark.parametrize("method", METHODS[:3])
def test_a_call_that_is_closed_without_a_request_is_refused(server, method):
    with opened(server, [method], half_closed=True) as (call,):
        assert ended(call) == (InvalidInput, "REQUEST_MISSING")
    assert server.server.waits.unsent == {"REQUEST_MISSING": 1}


def test_a_call_that_is_cancelled_before_its_request_is_logged_as_such(server):
    with capture_logs() as logs, opened(server, METHODS[:1]) as (call,):
        wait_until(lambda: server.server.waits.num_awaited == 1)
        call.cancel()
        wait_until(lambda: logs)
    assert logs[-1]["code"] == "CANCELLED"
    assert server.server.waits.unsent == {"CANCELLED": 1}


def test_of_too_many_calls_without_a_request_the_oldest_ends_and_others_get_in(scripted, server):
    server.server.waits.max_awaited = 3
    with opened(server, METHODS[:1] * 3) as calls:
        wait_until(lambda: server.server.waits.num_awaited == 3)
        with grpc.insecure_channel(server.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            inference = inference_pb2_grpc.InferenceServiceStub(channel)
            inference.GetModel(inference_pb2.GetModelRequest(), timeout=60)
        wait_until(lambda: any(call.done() for call in calls))
        (done,) = (call for call in calls if call.done())
        assert ended(done) == (Exhausted, "TOO_MANY_IDLE_CALLS")
        assert server.server.waits.num_awaited == 2


async def test_an_expired_wait_is_not_ended_again():
    waits = ClientWaits(30.0)

    async def read():
        return b"message"

    assert await waits.request(read) == b"message"
    waits.drain()
    assert (waits.num_awaited, waits.unsent) == (0, {})


@pytest.mark.parametrize("num_responses", [1, 400], ids=["written", "being-written"])
def test_a_client_that_does_not_read_does_not_hold_a_drain(scripted, num_responses):
    """Messages wait in gRPC or in the handler, because the client's flow-control window is smaller than one
    response."""
    written = threading.Event()

    async def generate(request, context):
        for _ in range(num_responses):
            written.set()
            yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text="x" * 100_000))

    scripted.on_generate = generate
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
    with (
        running(scripted, delivery_timeout_s=0.3, grace_s=0.0, drain_timeout_s=300.0) as server,
        grpc.insecure_channel(server.target, options=options) as channel,
    ):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        assert written.wait(60)
        asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop).result(60)
        call.cancel()


def test_a_client_that_reads_gets_all_of_its_answer_during_a_drain(scripted):
    begun, written, num_waited = threading.Event(), [], 0

    async def generate(request, context):
        for number in range(100):
            written.append(number)
            begun.set()
            yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text="x" * 100_000))

    async def num_written():
        return len(written)

    def wait_for_more(num_waited):
        """The server may not have seen yet that the client has read, and one message has one wait alone."""
        wait_until(lambda: len(written) > num_waited or len(written) == 100)

    scripted.on_generate = generate
    with (
        running(scripted, delivery_timeout_s=60.0, grace_s=0.0, drain_timeout_s=300.0) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        assert begun.wait(60)
        draining = asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop)
        num_read = 0
        for num_read, _ in enumerate(call, 1):
            if num_read in (30, 60, 90):  # together longer than one message may take
                wait_for_more(num_waited)
                pass_time(server, 25)
                num_waited = asyncio.run_coroutine_threadsafe(num_written(), server.loop).result(60)
        assert num_read == 100
        draining.result(60)
