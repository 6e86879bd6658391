"""The standard health service.

gRPC's own servicer for asyncio writes to watchers while it holds a lock of all of them, so one that does not read keeps
the health from being set or watched, and a drain from its beginning. It starts as SERVING, and lacks `List`.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.errors import NotFound
from shared.rpc.addresses import bind, parse_listen

_Status = health_pb2.HealthCheckResponse
# How long a stop waits until watchers are told. Only those that do not read take this long.
TELLING_S = 0.5


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The health of `names` and of "", the server itself. NOT_SERVING until `set`. Belongs to one event loop."""

    def __init__(self, names: Sequence[str]) -> None:
        self._statuses: dict[str, Any] = dict.fromkeys(("", *names), _Status.NOT_SERVING)
        self._changed = asyncio.Event()
        self._watches: set[object] = set()
        # Watches that are not told of the latest change.
        self._untold: set[object] = set()
        self._all_told = asyncio.Event()
        self._is_stopping = False

    def set(self, status: Any) -> None:
        """Set the health of all. Has no effect after `stop`."""
        if not self._is_stopping:
            self._statuses = dict.fromkeys(self._statuses, status)
            self._untold = set(self._watches)
            self._changed.set()
            self._changed = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        return bool(self._statuses[""] == _Status.SERVING)

    async def stop(self) -> None:
        """Set the health of all to NOT_SERVING for good, and wait at most `TELLING_S` until watchers are told."""
        self.set(_Status.NOT_SERVING)
        self._is_stopping = True
        self._all_told.clear()
        with suppress(TimeoutError):
            while self._untold:
                await asyncio.wait_for(self._all_told.wait(), TELLING_S)

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.service not in self._statuses:
            raise NotFound(f"there is no service {request.service[:128]!r} here", reason="SERVICE_NOT_FOUND")
        return _Status(status=self._statuses[request.service])

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        last, watch = None, object()
        self._watches.add(watch)
        try:
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, _Status.SERVICE_UNKNOWN)
                if status != last:
                    last = status
                    yield _Status(status=status)
                if changed is self._changed:
                    self._told(watch)
                    await changed.wait()
        finally:
            self._watches.discard(watch)
            self._told(watch)

    def _told(self, watch: object) -> None:
        self._untold.discard(watch)
        if not self._untold:
            self._all_told.set()

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        messages: Any = health_pb2  # the type stubs do not have List yet
        statuses = {name: _Status(status=status) for name, status in self._statuses.items()}
        return messages.HealthListResponse(statuses=statuses)


# A request contains only the name of a service, so messages are small.
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", 4096),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Probes come one by one. More connections would take the files that clients of the service need.
    ("grpc.max_allowed_incoming_connections", 32),
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
