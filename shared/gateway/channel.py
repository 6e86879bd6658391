"""The gateway's channel to the workers, opened anew when the files of its certificates change."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from neap_client.addresses import is_loopback_target, with_scheme
from neap_client.channel import CHANNEL_OPTIONS
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from shared.errors import InvalidInput
from shared.gateway_settings import GatewaySettings
from shared.rpc.certificates import load_certificates, own_certificate
from shared.rpc.watched_files import WatchedFiles

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
# Calls go in turn to the workers whose health is SERVING, so none goes to one that loads or drains.
SERVICE_CONFIG = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": SERVICE_NAME},
    }
)


class Stubs:
    """The workers' services on one channel. The generated stubs are untyped."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)


class WorkerChannel:
    """Belongs to one event loop. Without files, or while they do not change, there is one channel for all calls.

    Raises InvalidInput: BAD_CERTIFICATE, BAD_CONFIGURATION for files that cannot be used, TOKENS_OVER_PLAIN_TEXT if clients' tokens
    would be sent to another machine in plain text.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._closing: set[asyncio.Task[None]] = set()
        self._names = [
            name
            for name in ("worker_cert", "worker_key", "worker_ca")
            if getattr(settings, name) is not None
        ]
        self._paths: list[Path] = [getattr(settings, name) for name in self._names]
        self._files = WatchedFiles("worker certificate", self._paths, self._open)

    def stubs(self) -> Stubs:
        """Return the stubs for the next call. After a change of the files, running calls end on the channel on which they began."""
        before = self._files.value.channel
        if self._files.refresh():
            closing = asyncio.create_task(before.close(self._settings.generation_timeout_s))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return self._files.value

    async def close(self) -> None:
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._files.value.channel.close()

    def _open(self, contents: Sequence[bytes]) -> Stubs:
        settings = self._settings
        options = dict(CHANNEL_OPTIONS) | {"grpc.service_config": SERVICE_CONFIG}
        target = with_scheme(settings.workers)
        if settings.worker_tls or contents:
            if settings.worker_server_name:
                options["grpc.ssl_target_name_override"] = settings.worker_server_name
            credentials = self._credentials(contents)
            return Stubs(grpc.aio.secure_channel(target, credentials, [*options.items()]))
        if not (settings.drop_tokens or settings.allow_plaintext_tokens):
            if not is_loopback_target(settings.workers):
                raise InvalidInput(
                    f"tokens of clients would be sent to {settings.workers} in plain text: set --worker-ca or --worker-tls; if the"
                    " workers need no tokens, --drop-tokens; if something else encrypts the connection, --allow-plaintext-tokens",
                    reason="TOKENS_OVER_PLAIN_TEXT",
                )
            # If http_proxy is set, gRPC would send even calls to loopback through that proxy.
            options["grpc.enable_http_proxy"] = 0
        return Stubs(grpc.aio.insecure_channel(target, [*options.items()]))

    def _credentials(self, contents: Sequence[bytes]) -> grpc.ChannelCredentials:
        given = dict(zip(self._names, contents, strict=True))
        if "worker_cert" in given:
            own_certificate(self._paths, contents)
        if "worker_ca" in given:
            load_certificates(self._paths[-1], given["worker_ca"])
        credentials: grpc.ChannelCredentials = grpc.ssl_channel_credentials(
            given.get("worker_ca"), given.get("worker_key"), given.get("worker_cert")
        )
        return credentials
