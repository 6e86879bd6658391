"""A grpc.aio server with health checks, reflection and graceful shutdown."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from neap_client.channel import MAX_MESSAGE_BYTES

from shared.rpc.addresses import bind, max_connections, parse_listen
from shared.rpc.calls import DELIVERY_TIMEOUT_S, ClientWaits
from shared.rpc.health import HealthPort, HealthServicer
from shared.rpc.interceptors import SIDE_SERVICES, ServiceInterceptor
from shared.rpc.logs import underlying_stream
from shared.rpc.security import ServerSecurity

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Otherwise two processes on one port would silently share its connections.
    ("grpc.so_reuseport", 0),
    # A peer that disappears without closing the connection must not count as a running call or keep the connection open
    # forever.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC would give a handshake two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Clients may ping this often.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Bytes buffered here for a client that does not read, in addition to its flow-control window.
    ("grpc.http2.write_buffer_size", 8 * 1024),
)

# How long ended calls may take to deliver their status. Only clients that do not read take this long.
ENDING_S = 2.0
# How long calls that are handed over may take to deliver what they have.
HANDING_OVER_S = 0.5

log = structlog.get_logger("neap.rpc")


class ServerSettings(Protocol):
    """What a server needs of the settings of its service, which describe them (`shared.service_settings`)."""

    listen: str
    health_listen: str
    grace_s: float
    drain_timeout_s: float
    request_timeout_s: float
    max_connection_age_s: float | None
    max_connection_age_grace_s: float | None


class RpcServer:
    """Owns one grpc.aio server. NOT_SERVING until `set_serving`.

    Must be created inside the running event loop. All times are in seconds.

    - `service_names`: full names ("neap.inference.v1.InferenceService"), each with its own health entry beside "".
    - `delivery_timeout_s`: how long a drain waits for a client to read.
    - `on_stop`: called as soon as a stop is requested. It may end calls that never end by themselves.
    - `hand_over`: called when the time of a drain is over. It may end calls that go on elsewhere, with a reason of its
      own, and returns their number.
    """

    def __init__(
        self,
        settings: ServerSettings,
        service_names: Sequence[str],
        *,
        security: ServerSecurity | None = None,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        on_stop: Callable[[], object] = lambda: None,
        hand_over: Callable[[], int] = lambda: 0,
    ) -> None:
        self.listen = settings.listen
        self.port = 0
        self.grace_s = settings.grace_s
        self.drain_timeout_s = settings.drain_timeout_s
        self._on_stop = on_stop
        self._hand_over = hand_over
        self.security = security or ServerSecurity()
        self.waits = ClientWaits(settings.request_timeout_s, delivery_timeout_s=delivery_timeout_s)
        interceptor = ServiceInterceptor(self.security.access, self.waits)
        self._calls = interceptor.calls
        self.grpc_server: Any = grpc.aio.server(
            interceptors=(interceptor,),
            options=(
                *SERVER_OPTIONS,
                # Also those that have not finished their handshake.
                ("grpc.max_allowed_incoming_connections", max_connections()),
                *_milliseconds("grpc.max_connection_age_ms", settings.max_connection_age_s),
                *_milliseconds("grpc.max_connection_age_grace_ms", settings.max_connection_age_grace_s),
            ),
        )
        self._service_names = tuple(service_names)
        self._health = HealthServicer(self._service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        names = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)
        self.health_port: HealthPort | None = None
        if settings.health_listen:
            self.health_port = HealthPort(settings.health_listen, self._health, interceptor)
        self._stop_requested = asyncio.Event()
        self._stop_now = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Whether the health is SERVING."""
        return self._health.is_serving

    async def start(self) -> int:
        """Bind the address and answer calls, with the health NOT_SERVING.
        Prints "listening on HOST:PORT" and returns the port.

        Raises InvalidInput for an invalid address, Unavailable if it cannot be bound.
        """
        host, _ = parse_listen(self.listen)
        self.port = bind(self.grpc_server, self.listen, self.security.credentials)
        if self.health_port is not None:
            await self.health_port.start()
        await self.grpc_server.start()
        print(f"listening on {host}:{self.port}", file=underlying_stream(sys.stdout), flush=True)
        log.info("listening", host=host, port=self.port)
        return self.port

    async def set_serving(self) -> None:
        """Set the health to SERVING. Does nothing once the server is draining."""
        self._health.set(health_pb2.HealthCheckResponse.SERVING)
        log.info("serving")

    async def drain(self) -> None:
        """Set the health to NOT_SERVING, accept calls for `grace_s`, let running calls finish, and stop.

        Calls that still run after `drain_timeout_s` end with UNAVAILABLE (reason SHUTTING_DOWN). A second
        `request_stop` ends them at once.
        """
        await self._health.stop()
        log.info("draining", grace_s=self.grace_s, drain_timeout_s=self.drain_timeout_s)
        self.waits.drain()
        # server.stop() closes the listener at once, so the grace period comes first.
        is_hurried = await _set_within(self._stop_now, self.grace_s)
        if not is_hurried and await self._finish():
            log.info("stopped")
            return
        if self._hand_over():
            await self._calls.wait_all_answered(HANDING_OVER_S)
        # This also covers calls that arrive before the listener is closed. gRPC would end them without a reason.
        num_ended = self._calls.end()
        await self._calls.wait_all_answered(ENDING_S)
        # A later stop with a shorter grace overrides the earlier one.
        await self._stop_servers(ENDING_S)
        log.info("stopped at once", num_calls_ended=num_ended)

    async def _finish(self) -> bool:
        """Let running calls finish, and stop. False if calls still run after `drain_timeout_s` or at a second
        `request_stop`.

        Once all handlers are done, clients get `delivery_timeout_s` to read the rest.
        """
        # Health watchers have been notified by now, and they would never end their calls themselves.
        self._calls.end(SIDE_SERVICES)
        if self.drain_timeout_s == 0:
            return False
        stopping = asyncio.create_task(self.grpc_server.stop(self.drain_timeout_s + 3 * ENDING_S))
        hurried = asyncio.create_task(self._stop_now.wait())
        idle = asyncio.create_task(self._calls.wait_idle(self.waits.delivery_timeout_s))
        await asyncio.wait((stopping, hurried, idle), timeout=self.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        idle.cancel()
        if not stopping.done():
            if not idle.done() or self._stop_now.is_set():
                return False
            log.warning("clients have not read their answers", waited_s=self.waits.delivery_timeout_s)
        await self._stop_servers(0)
        stopping.cancel()
        return True

    def request_stop(self) -> None:
        """Do what SIGTERM does: the first call drains the server, the second stops it at once."""
        if self._stop_requested.is_set():
            self._stop_now.set()
        self._on_stop()
        self._stop_requested.set()

    async def run(self, prepare: Callable[[], Awaitable[None]]) -> bool:
        """Start, await `prepare` (load, warm up), serve until SIGTERM or SIGINT, and drain.

        Returns False if a signal arrived before `prepare` was done. A thread of `prepare` may then still be running. If
        `prepare` raises, the server stops and the exception is raised.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        await self.start()
        preparing = asyncio.ensure_future(prepare())
        stopping = asyncio.create_task(self._stop_requested.wait())
        await asyncio.wait((preparing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            preparing.cancel()
            await self._health.stop()
            await self.stop()
            return False
        try:
            preparing.result()
        except BaseException:
            stopping.cancel()
            await self.stop()
            raise
        await self.set_serving()
        await stopping
        await self.drain()
        return True

    async def stop(self) -> None:
        """Stop at once and end running calls."""
        await self._stop_servers(None)

    async def _stop_servers(self, grace_s: float | None) -> None:
        """Stop both, and wait for that at most `ENDING_S` longer, whatever their peers do."""
        stops = [self.grpc_server.stop(grace_s)] + ([self.health_port.stop()] if self.health_port else [])
        _, pending = await asyncio.wait(map(asyncio.ensure_future, stops), timeout=(grace_s or 0) + ENDING_S)
        for stopping in pending:
            stopping.cancel()


def _milliseconds(name: str, seconds: float | None) -> tuple[tuple[str, int], ...]:
    """The option of gRPC `name`, or none."""
    return () if seconds is None else ((name, max(1, round(seconds * 1000))),)


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
