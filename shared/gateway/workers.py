"""The gateway's client of the workers: one channel, on which the calls go to the workers in turn."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog
from neap_client import AsyncNeapClient, ClientSecurity
from neap_client.addresses import is_loopback_target
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.metadata import Metadata

from shared.errors import InvalidInput, NeapError, Unavailable
from shared.gateway_settings import GatewaySettings

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
UNARY_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 2.0

log = structlog.get_logger("neap.gateway")


class Workers:
    """Belongs to one event loop. Every method raises NeapError as the worker raised it.

    Raises InvalidInput: BAD_CONFIGURATION for files that cannot be used, TOKENS_OVER_PLAIN_TEXT if clients' tokens would be sent
    to another machine in plain text.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        # A full worker's retry delay is passed on to the HTTP client, so the gateway does not wait for it.
        self._client = AsyncNeapClient(
            settings.workers,
            security=_security(settings),
            timeout_s=UNARY_TIMEOUT_S,
            num_attempts=settings.num_attempts,
            waits_when_full=False,
        )

    async def close(self) -> None:
        await self._client.close()

    async def is_serving(self) -> bool:
        """Return whether one worker says that it serves. Raises nothing."""
        try:
            return await self._client.is_serving(SERVICE_NAME, timeout_s=HEALTH_TIMEOUT_S)
        except NeapError as error:
            log.debug("no worker is ready", reason=error.reason, why=error.message)
            return False

    async def list_models(self, metadata: Metadata) -> list[pb.Model]:
        with _logged():
            return await self._client.list_models(metadata=metadata)

    async def get_model(self, model_id: str, metadata: Metadata) -> pb.Model:
        with _logged():
            return await self._client.get_model(model_id, metadata=metadata)

    @asynccontextmanager
    async def generate(
        self, request: pb.GenerateRequest, request_id: str, metadata: Metadata, deadline_s: float
    ) -> AsyncIterator[AsyncIterator[pb.GenerateResponse]]:
        """Make a call and yield its events. The call is cancelled when the block is left. `deadline_s` in `time.monotonic()` seconds.

        The call is repeated while no worker answers, until the first event after Started has arrived.
        """
        stream = self._client.generate(
            request,
            timeout_s=max(0.0, deadline_s - time.monotonic()),
            request_id=request_id,
            metadata=metadata,
        )
        async with stream:
            with _logged():
                await stream.start()
                yield stream


@contextmanager
def _logged() -> Iterator[None]:
    """Log failures that gRPC itself reports. The HTTP client sees only their reason, because the text may contain addresses."""
    try:
        yield
    except NeapError as error:
        if error.reason.startswith("GRPC_"):
            log.warning("call to a worker failed", reason=error.reason, why=error.message)
        raise


def _security(settings: GatewaySettings) -> ClientSecurity:
    security = ClientSecurity(
        tls=settings.worker_tls,
        ca=settings.worker_ca,
        certificate=settings.worker_cert,
        key=settings.worker_key,
        server_name=settings.worker_server_name,
    )
    passes_tokens = not (settings.drop_tokens or settings.allow_plaintext_tokens)
    if passes_tokens and not (security.is_encrypted or is_loopback_target(settings.workers)):
        raise InvalidInput(
            f"tokens of clients would be sent to {settings.workers} in plain text: set --worker-ca or --worker-tls; if the"
            " workers need no tokens, --drop-tokens; if something else encrypts the connection, --allow-plaintext-tokens",
            reason="TOKENS_OVER_PLAIN_TEXT",
        )
    return security


def no_answer() -> Unavailable:
    """Return the error for a stream that ended without Finished."""
    return Unavailable("the worker ended the answer early", reason="INCOMPLETE_ANSWER")
