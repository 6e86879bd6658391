"""The gateway's client of the workers: one channel, on which the calls go to the workers in turn."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap.inference.v1 import inference_pb2 as pb
from neap.inference.v1 import inference_pb2_grpc

from shared.errors import InvalidInput, NeapError, Unavailable
from shared.gateway_settings import GatewaySettings
from shared.rpc.addresses import is_loopback_target
from shared.rpc.client import CHANNEL_OPTIONS
from shared.rpc.retry import is_unavailable, retrying_async
from shared.rpc.status import from_rpc_error
from shared.rpc.watched_files import read_capped

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
UNARY_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 2.0

Metadata = Sequence[tuple[str, str]]
log = structlog.get_logger("neap.gateway")


class Workers:
    """Belongs to one event loop. Every method raises NeapError as the worker raised it (`shared.rpc.status.from_rpc_error`).

    Raises InvalidInput: BAD_CONFIGURATION for files that cannot be used, TOKENS_OVER_PLAIN_TEXT if clients' tokens would be sent
    to another machine in plain text.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._num_attempts = settings.num_attempts
        self._channel = _open_channel(settings)
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def is_serving(self) -> bool:
        """Return whether one worker says that it serves. Raises nothing."""
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        try:
            reply = await self._health.Check(request, timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.debug("no worker is ready", code=error.code().name, why=error.details())
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def list_models(self, metadata: Metadata) -> list[pb.Model]:
        reply = await self._unary(self._inference.ListModels, pb.ListModelsRequest(), metadata)
        return list(reply.models)

    async def get_model(self, model_id: str, metadata: Metadata) -> pb.Model:
        request = pb.GetModelRequest(model_id=model_id)
        reply: pb.GetModelResponse = await self._unary(self._inference.GetModel, request, metadata)
        return reply.model

    @asynccontextmanager
    async def generate(
        self, request: pb.GenerateRequest, metadata: Metadata, deadline_s: float
    ) -> AsyncIterator[AsyncIterator[pb.GenerateResponse]]:
        """Make a call and yield its events. The call is cancelled when the block is left. `deadline_s` in `time.monotonic()` seconds.

        The call is repeated while no worker answers, until the first event after Started has arrived.
        """
        call: Any = None
        held: list[pb.GenerateResponse] = []

        async def attempt() -> None:
            nonlocal call
            held.clear()
            call = self._inference.Generate(
                request, metadata=metadata, timeout=max(0.0, deadline_s - time.monotonic())
            )
            while not held or held[-1].HasField("started"):
                event = await _read(call)
                if event is None:
                    return
                held.append(event)

        async def events() -> AsyncIterator[pb.GenerateResponse]:
            for early in held:
                yield early
            while (event := await _read(call)) is not None:
                yield event

        try:
            await retrying_async(
                is_unavailable, num_attempts=self._num_attempts, deadline_s=deadline_s
            )(attempt)
            yield events()
        finally:
            if call is not None:
                call.cancel()

    async def _unary(self, method: Any, request: Any, metadata: Metadata) -> Any:
        async def attempt() -> Any:
            try:
                return await method(request, metadata=metadata, timeout=UNARY_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise _converted(error) from error

        return await retrying_async(is_unavailable, num_attempts=self._num_attempts)(attempt)


async def _read(call: Any) -> pb.GenerateResponse | None:
    """Return the next event, or None at the end."""
    try:
        event = await call.read()
    except grpc.aio.AioRpcError as error:
        raise _converted(error) from error
    return None if event is grpc.aio.EOF else event


def _converted(error: grpc.aio.AioRpcError) -> NeapError:
    converted = from_rpc_error(error)
    if converted.reason.startswith("GRPC_"):
        # The client sees only the reason, because the text may contain addresses.
        log.warning("call to a worker failed", reason=converted.reason, why=converted.message)
    return converted


def _open_channel(settings: GatewaySettings) -> grpc.aio.Channel:
    options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, ("grpc.service_config", ROUND_ROBIN)]
    certificates = (settings.worker_ca, settings.worker_key, settings.worker_cert)
    if settings.worker_tls or any(certificates):
        if settings.worker_server_name:
            options.append(("grpc.ssl_target_name_override", settings.worker_server_name))
        ca, key, chain = (None if path is None else read_capped(path) for path in certificates)
        credentials = grpc.ssl_channel_credentials(ca, key, chain)
        return grpc.aio.secure_channel(settings.workers, credentials, options=options)
    if not (settings.drop_tokens or settings.allow_plaintext_tokens):
        if not is_loopback_target(settings.workers):
            raise InvalidInput(
                f"tokens of clients would be sent to {settings.workers} in plain text: set --worker-ca or --worker-tls; if the"
                " workers need no tokens, --drop-tokens; if something else encrypts the connection, --allow-plaintext-tokens",
                reason="TOKENS_OVER_PLAIN_TEXT",
            )
        # If http_proxy is set, gRPC would send even calls to loopback through that proxy.
        options.append(("grpc.enable_http_proxy", 0))
    return grpc.aio.insecure_channel(settings.workers, options=options)


def no_answer() -> Unavailable:
    """Return the error for a stream that ended without Finished."""
    return Unavailable("the worker ended the answer early", reason="INCOMPLETE_ANSWER")
