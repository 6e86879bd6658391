"""The gateway's calls to the workers."""

import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.metadata import Metadata
from neap_client.retry import Attempts, is_unavailable, repeat_async
from neap_client.status import from_rpc_error

from shared.errors import NeapError, Unavailable
from shared.gateway.channel import SERVICE_NAME, WorkerChannel
from shared.gateway_settings import GatewaySettings

UNARY_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 2.0

log = structlog.get_logger("neap.gateway")


class Workers:
    """Belongs to one event loop. Every method raises NeapError as the worker raised it (`neap_client.status.from_rpc_error`).

    Raises InvalidInput as WorkerChannel does.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._num_attempts = settings.num_attempts
        self._channel = WorkerChannel(settings)

    async def close(self) -> None:
        await self._channel.close()

    async def is_serving(self) -> bool:
        """Return whether a worker serves. Raises nothing."""
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        try:
            reply = await self._channel.stubs().health.Check(request, timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.debug("no worker is ready", code=error.code().name, why=error.details())
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def list_models(self, metadata: Metadata) -> list[pb.Model]:
        models: list[pb.Model] = []
        request = pb.ListModelsRequest()
        while True:
            reply: pb.ListModelsResponse = await self._unary("ListModels", request, metadata)
            models += reply.models
            if not reply.next_page_token:
                return models
            request = pb.ListModelsRequest(page_token=reply.next_page_token)

    async def get_model(self, model_id: str, metadata: Metadata) -> pb.Model:
        request = pb.GetModelRequest(model_id=model_id)
        reply: pb.GetModelResponse = await self._unary("GetModel", request, metadata)
        return reply.model

    async def generate(
        self, request: pb.GenerateRequest, metadata: Metadata, deadline_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Make a call and yield its events. Leaving cancels the call. `deadline_s` in `time.monotonic()` seconds.

        The call is repeated while no worker answers, until the first event after Started has arrived.
        """
        call: Any = None
        held: list[pb.GenerateResponse] = []

        async def attempt() -> None:
            nonlocal call
            held.clear()
            call = self._channel.stubs().inference.Generate(
                request, metadata=metadata, timeout=max(0.0, deadline_s - time.monotonic())
            )
            while not held or held[-1].HasField("started"):
                event = await _read(call)
                if event is None:
                    return
                held.append(event)

        attempts = Attempts(is_unavailable, num_attempts=self._num_attempts, deadline_s=deadline_s)
        try:
            await repeat_async(attempt, attempts)
            for early in held:
                yield early
            while (event := await _read(call)) is not None:
                yield event
        finally:
            if call is not None:
                call.cancel()

    async def _unary(self, method: str, request: Any, metadata: Metadata) -> Any:
        async def attempt() -> Any:
            call = getattr(self._channel.stubs().inference, method)
            try:
                return await call(request, metadata=metadata, timeout=UNARY_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise _converted(error) from error

        attempts = Attempts(is_unavailable, num_attempts=self._num_attempts)
        return await repeat_async(attempt, attempts)


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


def no_answer() -> Unavailable:
    """Return the error for a stream that ended without Finished."""
    return Unavailable("the worker ended the answer early", reason="INCOMPLETE_ANSWER")
