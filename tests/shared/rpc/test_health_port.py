"""The plain-text health port of a server that requires certificates."""

import asyncio

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc

from shared.errors import InvalidInput, Unavailable
from shared.rpc.certificates import ServerCertificate
from shared.rpc.security import ServerSecurity
from shared.rpc.serving import RpcServer
from tests.certificates import issued, write
from tests.server_settings import ServerSettings
from tests.shared.rpc.conftest import SERVICE, pass_time, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def server(scripted, tmp_path):
    files = write(tmp_path, issued(trustme.CA(), "127.0.0.1"))
    certificate = ServerCertificate(files.certificate, files.key, files.authority)
    with running(scripted, security=ServerSecurity(certificate), health_listen="127.0.0.1:0") as server:
        server.health_target = f"127.0.0.1:{server.server.health_port.port}"
        yield server


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.health_target) as channel:
        yield channel


def _check(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    return [stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status for name in ("", SERVICE)]


def test_a_probe_without_a_certificate_sees_the_health_of_the_server(server, channel):
    assert server.target != server.health_target
    assert _check(channel) == [NOT_SERVING] * 2
    server.run(server.server.set_serving())
    assert _check(channel) == [SERVING] * 2
    with grpc.insecure_channel(server.target) as closed, pytest.raises(grpc.RpcError) as caught:
        _check(closed)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_it_answers_nothing_but_health(channel, scripted):
    with pytest.raises(grpc.RpcError) as caught:
        inference_pb2_grpc.InferenceServiceStub(channel).GetModel(inference_pb2.GetModelRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    reflect = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(reflect)(iter([b""]), timeout=60))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x" * 10_000), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert scripted.num_calls == 0


def test_it_says_not_serving_while_draining_and_ends_with_the_server(server, channel):
    server.run(server.server.set_serving())
    server.server.grace_s, server.server.drain_timeout_s = 3600.0, 3600.0
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING
    draining = asyncio.run_coroutine_threadsafe(server.server.drain(), server.loop)
    assert next(watch).status == NOT_SERVING
    assert _check(channel) == [NOT_SERVING] * 2
    pass_time(server, 3600)
    draining.result(60)  # health watchers do not delay it
    with pytest.raises(grpc.RpcError):
        _check(channel)


async def test_an_address_that_cannot_be_bound_is_an_error(capsys):
    taken = RpcServer(ServerSettings(), [])
    port = await taken.start()
    try:
        with pytest.raises(Unavailable, match=str(port)):
            await RpcServer(ServerSettings(health_listen=f"127.0.0.1:{port}"), []).start()
        with pytest.raises(InvalidInput):
            await RpcServer(ServerSettings(health_listen="8086"), []).start()
    finally:
        await taken.stop()
