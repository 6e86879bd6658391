"""Fixtures: a server on loopback whose Generate and GetModel are scripted by each test."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc
from neap_client.status import from_rpc_error

from shared.errors import NeapError
from shared.rpc.calls import DELIVERY_TIMEOUT_S
from shared.rpc.serving import RpcServer
from tests.server_settings import ServerSettings

SERVICE = "neap.inference.v1.InferenceService"


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Calls `on_get_model` and `on_generate`, which the test sets."""

    def __init__(self) -> None:
        self.on_get_model: Callable[[Any, Any], Any] = lambda request, context: None
        self.on_generate: Callable[[Any, Any], AsyncIterator[Any]] | None = None
        self.num_calls = 0

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.num_calls += 1
        result = self.on_get_model(request, context)
        if asyncio.iscoroutine(result):
            result = await result
        return result or inference_pb2.GetModelResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.num_calls += 1
        # Where the call ends between two events, `async for` alone would leave the inner generator to the collector.
        async with aclosing(self.on_generate(request, context)) as events:
            async for event in events:
                yield event


@contextmanager
def running(
    servicer: Any, *, security: Any = None, delivery_timeout_s: float = DELIVERY_TIMEOUT_S, **settings: Any
) -> Iterator[SimpleNamespace]:
    """Run a server in a thread; yields its target, the server and its event loop."""
    state = SimpleNamespace()
    started, finish = threading.Event(), None

    async def serve() -> None:
        nonlocal finish
        finish = asyncio.Event()
        state.loop = asyncio.get_running_loop()
        given = ServerSettings(**settings)
        state.server = RpcServer(given, [SERVICE], security=security, delivery_timeout_s=delivery_timeout_s)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, state.server.grpc_server)
        state.target = f"{given.listen.rpartition(':')[0]}:{await state.server.start()}"
        started.set()
        await finish.wait()
        await state.server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(60)
    state.run = lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, state.loop).result(60)
    try:
        yield state
    finally:
        state.loop.call_soon_threadsafe(finish.set)
        thread.join(60)
        assert not thread.is_alive()


def pass_time(state: SimpleNamespace, seconds: float) -> None:
    """Moves the clock of the server's event loop forward, so that timers due by then end now."""
    time_s = state.loop.time
    state.loop.call_soon_threadsafe(setattr, state.loop, "time", lambda: time_s() + seconds)


def begun_call(stub: Any, *, with_deadline: bool) -> Any:
    """A Generate call that has had its first event.
    `with_deadline`: the deadline passes soon, later on a slow machine."""
    for timeout_s in (0.2, 2.0, 20.0, 100.0) if with_deadline else (None,):
        call = stub.Generate(inference_pb2.GenerateRequest(), timeout=timeout_s)
        with suppress(grpc.RpcError):
            next(call)
            return call
    raise AssertionError("no call got its first event")


def ended(call: Any) -> tuple[type[NeapError], str]:
    """(class, reason) of the status with which a call ends."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error = from_rpc_error(caught.value)
    return type(error), error.reason


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def server(scripted: Scripted) -> Iterator[SimpleNamespace]:
    with running(scripted) as state:
        yield state
