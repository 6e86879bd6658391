"""Health checks in plain text on a port of their own: a kubelet speaks no TLS and has no certificate."""

from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2_grpc

from shared.rpc.addresses import bind, parse_listen

# A check is a service's name.
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", 4096),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

log = structlog.get_logger("neap.rpc")


class HealthPort:
    """Answers with `health`, the main server's own servicer, until `stop`. Must be made inside the running event loop."""

    def __init__(self, listen: str, health: Any, interceptor: grpc.aio.ServerInterceptor) -> None:
        self.port = 0
        self._listen = listen
        self._server: Any = grpc.aio.server(interceptors=(interceptor,), options=_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)

    async def start(self) -> None:
        """Raises InvalidInput for an address that is none, Unavailable when it cannot be had."""
        host, _ = parse_listen(self._listen)
        self.port = bind(self._server, self._listen)
        await self._server.start()
        log.info("health listening", host=host, port=self.port)

    async def stop(self) -> None:
        await self._server.stop(None)
