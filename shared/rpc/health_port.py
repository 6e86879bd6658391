"""Serves health checks in plain text on a separate port, because a kubelet supports no TLS and has no certificate."""

from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2_grpc

from shared.rpc.addresses import bind, parse_listen

# A request contains only the name of a service, so messages are small.
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", 4096),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

log = structlog.get_logger("neap.rpc")


class HealthPort:
    """Serves `health`, the servicer of the main server, until `stop`. Must be created inside the running event loop."""

    def __init__(self, listen: str, health: Any, interceptor: grpc.aio.ServerInterceptor) -> None:
        self.port = 0
        self._listen = listen
        self._server: Any = grpc.aio.server(interceptors=(interceptor,), options=_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)

    async def start(self) -> None:
        """Start to serve. Raises InvalidInput for an invalid address, Unavailable if it cannot be bound."""
        host, _ = parse_listen(self._listen)
        self.port = bind(self._server, self._listen)
        await self._server.start()
        log.info("health listening", host=host, port=self.port)

    async def stop(self) -> None:
        await self._server.stop(None)
