import asyncio
import json
import socket
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc
from structlog.testing import capture_logs

from shared.errors import Exhausted, InvalidInput, Unavailable
from shared.rpc import serving
from shared.rpc.serving import MAX_MESSAGE_BYTES, RpcServer
from tests.server_settings import ServerSettings
from tests.shared.rpc.conftest import ended, pass_time
from tests.waiting import wait_until, wait_until_async

SERVICE = "neap.inference.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TOLD = Unavailable, "SHUTTING_DOWN"


@pytest.fixture
def channel(server):
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.target, options=options) as channel:
        yield channel


def _health(channel, service):
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status


def test_health_of_each_service_is_not_serving_until_set(server, channel):
    assert [_health(channel, name) for name in ("", SERVICE)] == [NOT_SERVING] * 2
    server.run(server.server.set_serving())
    assert [_health(channel, name) for name in ("", SERVICE)] == [SERVING] * 2
    with pytest.raises(grpc.RpcError) as caught:
        _health(channel, "no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_health_lists_all_services(server, channel):
    server.run(server.server.set_serving())
    listed = health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=60)
    assert {name: reply.status for name, reply in listed.statuses.items()} == {"": SERVING, SERVICE: SERVING}


def test_messages_beyond_the_cap_are_refused_by_grpc(scripted, channel):
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    stub.GetModel(inference_pb2.GetModelRequest(model_id="x" * (MAX_MESSAGE_BYTES - 100)))
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetModel(inference_pb2.GetModelRequest(model_id="x" * MAX_MESSAGE_BYTES))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert scripted.num_calls == 1


RETRY_POLICY = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.01s",
                    "maxBackoff": "0.01s",
                    "backoffMultiplier": 1,
                    "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
                },
            }
        ]
    }
)


@pytest.mark.parametrize(("retry_after_s", "num_calls"), [(0.5, 2), (None, 1)])
def test_grpcs_own_retry_policy_heeds_the_pushback(scripted, server, retry_after_s, num_calls):
    async def full_at_first(request, context):
        if scripted.num_calls == 1:
            raise Exhausted("full", retry_after_s=retry_after_s)
        yield inference_pb2.GenerateResponse()

    scripted.on_generate = full_at_first
    started_s = time.monotonic()
    with grpc.insecure_channel(server.target, options=[("grpc.service_config", RETRY_POLICY)]) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        if retry_after_s is None:
            with pytest.raises(grpc.RpcError):
                list(call)
        else:
            assert len(list(call)) == 1
            assert time.monotonic() - started_s >= retry_after_s
    assert scripted.num_calls == num_calls


def _listens(target):
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=60).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:  # taken by the kernel when the listener closed
        pass
    return True


class PausedStream:
    """A Generate handler that writes the events "0", "1", .., and pauses before the event `pause_at` until `go_on` is
    set.

    While `is_paused` is set, no write is in progress that a jump of the clock could make late.
    """

    def __init__(self, num_events, pause_at):
        self._num_events, self._pause_at = num_events, pause_at
        self.is_paused, self.go_on = threading.Event(), threading.Event()

    async def __call__(self, request, context):
        for number in range(self._num_events):
            if number == self._pause_at:
                self.is_paused.set()
                while not self.go_on.is_set():
                    await asyncio.sleep(0.01)
            yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text=str(number)))


def test_drain_takes_calls_for_the_grace_and_finishes_streams(scripted, server, channel):
    scripted.on_generate = stream = PausedStream(10, pause_at=3)
    server.server.grace_s = 3600.0
    server.server._hand_over = lambda: pytest.fail("handed over although it ends in time")
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    server.run(server.server.set_serving())
    call = stub.Generate(inference_pb2.GenerateRequest())
    assert next(call).chunk.text == "0"
    draining = asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop)
    wait_until(lambda: _health(channel, SERVICE) == NOT_SERVING)
    stub.GetModel(inference_pb2.GetModelRequest(), timeout=60)  # still accepted
    assert stream.is_paused.wait(60)
    with capture_logs() as logs:
        pass_time(server, 3600)
        stream.go_on.set()
        assert [event.chunk.text for event in call] == [str(n) for n in range(1, 10)]
        draining.result(60)
    assert logs[-1]["event"] == "stopped"
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetModel(inference_pb2.GetModelRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_drain_ends_streams_that_outlast_the_timeout(scripted, server, channel):
    scripted.on_generate = stream = PausedStream(4, pause_at=3)
    server.server.grace_s, server.server.drain_timeout_s = 0.0, 3600.0
    handed_over: list[int] = []
    server.server._hand_over = lambda: handed_over.append(len(server.server._calls)) or 0
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.Generate(inference_pb2.GenerateRequest())
    next(call)
    draining = asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop)
    for _ in range(2):
        next(call)
    assert stream.is_paused.wait(60)
    assert not handed_over
    # The listener closes when the server waits for running calls, so the timer of that wait is set by then.
    wait_until(lambda: not _listens(server.target))
    assert not draining.done()
    pass_time(server, 3600)
    draining.result(60)
    assert handed_over == [1]
    assert ended(call) == TOLD


def test_health_watchers_do_not_delay_the_drain(server, channel):
    server.server.grace_s, server.server.drain_timeout_s = 0.0, 3600.0
    server.run(server.server.set_serving())
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert next(watch).status == SERVING
    server.run(server.server.drain())
    assert next(watch).status == NOT_SERVING
    assert ended(watch) == TOLD


@pytest.mark.parametrize("grace_s", [3600.0, 0.0])
def test_a_second_request_to_stop_stops_at_once(scripted, server, channel, grace_s):
    scripted.on_generate = PausedStream(4, pause_at=3)
    server.server.grace_s, server.server.drain_timeout_s = grace_s, 3600.0
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.Generate(inference_pb2.GenerateRequest())
    next(call)
    draining = asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop)
    server.loop.call_soon_threadsafe(server.server.request_stop)
    for _ in range(2):
        next(call)
    assert not draining.done()
    server.loop.call_soon_threadsafe(server.server.request_stop)
    draining.result(60)
    assert ended(call) == TOLD


def test_without_any_grace_running_and_arriving_calls_are_told_before_the_server_stops(
    scripted, server, channel, monkeypatch
):
    monkeypatch.setattr(serving, "ENDING_S", 60.0)
    tidying, tidied = threading.Event(), threading.Event()

    async def tidies_up(request, context):
        try:
            yield inference_pb2.GenerateResponse()
            await asyncio.sleep(60)
        finally:
            tidying.set()
            await asyncio.to_thread(tidied.wait, 60)

    scripted.on_generate = tidies_up
    server.server.grace_s = server.server.drain_timeout_s = 0.0
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    running = stub.Generate(inference_pb2.GenerateRequest())
    next(running)
    draining = asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop)
    assert tidying.wait(60)
    arriving = stub.Generate(inference_pb2.GenerateRequest())
    assert ended(arriving) == TOLD
    tidied.set()
    assert ended(running) == TOLD
    draining.result(60)


async def test_a_taken_port_and_a_bad_address_are_errors(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match="cannot listen"):
            await RpcServer(ServerSettings(address), []).start()
    for bad in ("nonsense", "127.0.0.1:", ":99x", "host:port"):
        with pytest.raises(InvalidInput):
            await RpcServer(ServerSettings(bad), []).start()
    assert capsys.readouterr().out == ""


async def test_two_servers_never_share_a_port():
    first = RpcServer(ServerSettings(), [])
    second = RpcServer(ServerSettings(f"127.0.0.1:{await first.start()}"), [])
    try:
        with pytest.raises(Unavailable):
            await second.start()
    finally:
        await first.grpc_server.stop(None)
        await second.grpc_server.stop(None)


async def test_run_prepares_serves_and_prints_its_address(capsys):
    server = RpcServer(ServerSettings(grace_s=0.0), [SERVICE])
    seen = []

    async def prepare():
        seen.append(await asyncio.to_thread(_health_of, server.port))

    running = asyncio.create_task(server.run(prepare))
    await wait_until_async(lambda: seen)

    async def is_serving():
        return await asyncio.to_thread(_health_of, server.port) == SERVING

    await wait_until_async(is_serving)
    server.request_stop()
    assert await asyncio.wait_for(running, 60) is True
    assert seen == [NOT_SERVING]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"listening on 127.0.0.1:{server.port}"


async def test_run_stops_while_preparing_and_passes_on_its_errors():
    preparing, blocked = asyncio.Event(), asyncio.Event()

    async def prepare():
        preparing.set()
        await blocked.wait()

    server = RpcServer(ServerSettings(), [SERVICE])
    running = asyncio.create_task(server.run(prepare))
    await preparing.wait()
    server.request_stop()
    assert await asyncio.wait_for(running, 60) is False

    async def fail():
        raise InvalidInput("bad model")

    with pytest.raises(InvalidInput, match="bad model"):
        await RpcServer(ServerSettings(), [SERVICE]).run(fail)


def _health_of(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return _health(channel, SERVICE)
