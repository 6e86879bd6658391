"""A gateway inside the test's process, and workers that do as a test says."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from neap_engine.gateway.app import Gateway
from neap_engine.gateway.clients import SERVICE_NAME, open_client
from neap_engine.gateway.metrics import GatewayMetrics
from neap_engine.gateway.server import GatewayServer
from shared.config import make_settings
from shared.errors import NotFound
from shared.gateway_settings import GatewaySettings
from shared.rpc.pages import named_page
from shared.rpc.security import ServerSecurity
from shared.rpc.serving import RpcServer
from tests.server_settings import ServerSettings

# Requests must not wait for a worker that is gone longer than they have to.
QUICK = {"listen": "127.0.0.1:0", "num_attempts": 1, "grace_s": 0.0}


@contextmanager
def running(make: Callable[[SimpleNamespace], Any]) -> Iterator[SimpleNamespace]:
    """Runs the coroutine `make(state)` on a loop of its own thread.
    It sets `state.ready`, and ends at `state.finish`."""
    state = SimpleNamespace(ready=threading.Event())

    async def main() -> None:
        state.loop, state.finish = asyncio.get_running_loop(), asyncio.Event()
        try:
            await make(state)
        finally:
            state.ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert state.ready.wait(60)
        yield state
    finally:
        if not state.loop.is_closed():
            state.loop.call_soon_threadsafe(state.finish.set)
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def gateway_to(target: str, **given: Any) -> Iterator[SimpleNamespace]:
    """Yields url, http (a client), server, gateway and metrics."""

    async def make(state: SimpleNamespace) -> None:
        settings = make_settings(GatewaySettings, workers=target, **{**QUICK, **given})
        state.metrics = GatewayMetrics()
        workers = open_client(settings)
        state.gateway = Gateway(settings, workers, state.metrics)
        state.server = GatewayServer(settings, state.gateway)
        listening = asyncio.Event()
        run = asyncio.create_task(state.server.run(listening))
        await listening.wait()
        scheme = "https" if settings.tls_cert else "http"
        state.port = state.server.port
        state.url = f"{scheme}://127.0.0.1:{state.port}"
        state.ready.set()
        finish = asyncio.create_task(state.finish.wait())
        await asyncio.wait((run, finish), return_when=asyncio.FIRST_COMPLETED)
        finish.cancel()
        state.server.request_stop()
        state.server.request_stop()
        await run
        await workers.close()

    with running(make) as state, httpx.Client(base_url=state.url, timeout=60) as state.http:
        yield state


class ScriptedWorker(inference_pb2_grpc.InferenceServiceServicer):
    """`script(request)` yields events and may raise. `cancelled` is set when a call is cancelled.
    `models` are the ids it lists."""

    def __init__(self, script: Callable[[pb.GenerateRequest], Any]) -> None:
        self.script = script
        self.models: list[str] = []
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.cancelled = threading.Event()
        self.num_questions = 0

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> Any:
        names, token = named_page(request, self.models, str)
        models = [pb.Model(model_id=name) for name in names]
        return pb.ListModelsResponse(models=models, next_page_token=token)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> Any:
        if not request.model_id:  # the gateway asks whether the caller may generate
            self.num_questions += 1
            raise NotFound("no model", reason="MODEL_NOT_FOUND")
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            for event in self.script(request):
                if isinstance(event, pb.GenerateResponse):
                    yield event
                else:
                    await event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise


@contextmanager
def scripted_worker(
    script: Callable[[pb.GenerateRequest], Any], security: ServerSecurity | None = None
) -> Iterator[SimpleNamespace]:
    """Yields target, worker and drain (which reports NOT_SERVING) of a server with the services' own interceptors."""

    async def make(state: SimpleNamespace) -> None:
        server = RpcServer(ServerSettings(grace_s=60), [SERVICE_NAME], security=security)
        state.worker = ScriptedWorker(script)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(state.worker, server.grpc_server)
        state.target = f"127.0.0.1:{await server.start()}"
        await server.set_serving()
        state.drain = lambda: asyncio.run_coroutine_threadsafe(server.drain(), state.loop)
        state.ready.set()
        await state.finish.wait()
        await server.stop()

    with running(make) as state:
        yield state


def started(**fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.Started(policy="full", seed=1, **fields))


def chunk(text: str) -> pb.GenerateResponse:
    tokens = [pb.Token(id=1, exit_depth=4, proposer="full")]
    return pb.GenerateResponse(chunk=pb.TokenChunk(text=text, tokens=tokens))


def finished(**fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_EOS, usage=pb.Usage(), **fields))


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
