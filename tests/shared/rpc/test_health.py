"""A watcher of the health that does not read keeps nobody else waiting."""

from contextlib import closing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.shared.rpc.conftest import SERVICE, running
from tests.waiting import wait_until
from tests.zero_window import ZeroWindow

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("drain_timeout_s", [0.0, 0.5])
def test_a_watcher_that_does_not_read_delays_neither_other_watchers_nor_the_drain(scripted, drain_timeout_s):
    with (
        running(scripted, delivery_timeout_s=0.2, grace_s=0.0, drain_timeout_s=drain_timeout_s) as state,
        closing(ZeroWindow(state.target)) as deaf,
        grpc.insecure_channel(state.target) as channel,
    ):
        for name in ("", SERVICE):
            deaf.call("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest(service=name).SerializeToString())
        wait_until(lambda: len(state.server._calls) == 2)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        assert next(watch).status == NOT_SERVING
        state.run(state.server.set_serving())
        assert next(watch).status == SERVING
        state.run(state.server.drain())
        assert next(watch).status == NOT_SERVING


def test_a_service_that_is_not_known_is_watched_and_not_found(server):
    request = health_pb2.HealthCheckRequest(service="other")
    with grpc.insecure_channel(server.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert next(stub.Watch(request, timeout=60)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
