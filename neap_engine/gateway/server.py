"""The gateway's HTTP server: uvicorn, with the shutdown of the other services."""

import asyncio
import contextlib
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from neap_client.addresses import is_loopback

from neap_engine.gateway.app import Gateway
from neap_engine.gateway.connection import MAX_HEAD_BYTES, connection_class
from shared.errors import InvalidInput, Unavailable
from shared.gateway_settings import GatewaySettings
from shared.rpc import addresses
from shared.rpc.addresses import parse_listen
from shared.rpc.certificates import ServerCertificate
from shared.rpc.logs import underlying_stream
from shared.rpc.security import ServerSecurity

log = structlog.get_logger("neap.gateway")


class HttpsCertificate(ServerCertificate):
    """The certificate of a gRPC service, with the same checks, for an HTTP server."""

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None = None) -> None:
        super().__init__(certificate, key, client_authority)
        self._paths = certificate, key, client_authority

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of a listener. Each handshake uses the latest usable files.
        Raises InvalidInput (BAD_CERTIFICATE)."""
        outer = current = self._load()

        def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            nonlocal current
            if self.files.refresh():
                try:
                    current = self._load()
                except InvalidInput as error:
                    log.error("certificate not reloaded", why=error.message, reason=error.reason)
            connection.context = current

        outer.sni_callback = choose
        return outer

    def _load(self) -> ssl.SSLContext:
        certificate, key, authority = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Never asks for a password: an empty one is refused.
            context.load_cert_chain(certificate, key, password=lambda: "")
            if authority is not None:
                context.load_verify_locations(authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise InvalidInput(f"{certificate} and {key} cannot be used", reason="BAD_CERTIFICATE") from error
        return context


# How long ended requests may take to deliver their error.
ENDING_S = 2.0
# Connections that wait to be accepted: uvicorn's own value.
BACKLOG = 2048
# Bytes that the kernel buffers for one client. The default grows to megabytes, all of which a client that does not read
# would get.
SEND_BUFFER_BYTES = 64 * 1024


class GatewayServer:
    """Serves `gateway` until `request_stop` has been called. Must be created inside the running event loop."""

    def __init__(self, settings: GatewaySettings, gateway: Gateway) -> None:
        """Raises InvalidInput (BAD_CERTIFICATE, BAD_CONFIGURATION) for certificate files that cannot be used."""
        self.port = 0
        self._settings = settings
        self._gateway = gateway
        self._stop_requested = asyncio.Event()
        self._stop_now = asyncio.Event()
        certificate = (
            None
            if settings.tls_cert is None or settings.tls_key is None
            else HttpsCertificate(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        )
        self.security = ServerSecurity(certificate)
        self._server = _Uvicorn(_config(settings, gateway, None if certificate is None else certificate.context()))

    @property
    def num_connections(self) -> int:
        """How many connections are open, those that are being closed included."""
        return len(self._server.server_state.connections)

    def request_stop(self) -> None:
        """Do what SIGTERM does: the first call drains the gateway, the second stops it at once."""
        if self._stop_requested.is_set():
            self._stop_now.set()
        self._stop_requested.set()

    def handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)

    async def run(self, on_listening: asyncio.Event | None = None) -> None:
        """Listen, print "listening on HOST:PORT", serve, drain.
        Raises InvalidInput for an invalid address, Unavailable if it cannot be bound."""
        host, _ = parse_listen(self._settings.listen)
        listener = _bind(self._settings.listen)
        self.port = listener.getsockname()[1]
        serving = asyncio.create_task(self._server.serve([listener]))
        if self.security.certificate is None and not is_loopback(host):
            log.warning("listening without TLS beyond loopback", listen=self._settings.listen)
        print(f"listening on {host}:{self.port}", file=underlying_stream(sys.stdout), flush=True)
        log.info("listening", host=host, port=self.port, workers=self._settings.workers)
        if on_listening is not None:
            on_listening.set()
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await self._drain(serving)
            await serving
        finally:
            stopping.cancel()
            listener.close()

    async def _drain(self, serving: "asyncio.Task[None]") -> None:
        """Report "not ready", accept requests for `grace_s`, let running ones finish, and end those that are left."""
        settings = self._settings
        log.info("draining", grace_s=settings.grace_s, drain_timeout_s=settings.drain_timeout_s)
        self._gateway.drain()
        hurried = asyncio.create_task(self._stop_now.wait())
        try:
            await asyncio.wait((hurried,), timeout=settings.grace_s)
            # Closes the listener and idle connections, and waits for the others.
            self._server.should_exit = True
            await asyncio.wait(
                (serving, hurried), timeout=settings.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            hurried.cancel()
        if not serving.done():
            num_ended = self._gateway.num_running
            self._gateway.ending.set()
            await asyncio.wait((serving,), timeout=ENDING_S)
            self._server.abort()
            log.info("stopped at once", num_requests_ended=num_ended)
        else:
            log.info("stopped")


class _Uvicorn(uvicorn.Server):
    """Leaves signals to GatewayServer."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort(self) -> None:
        """Close what is still open. `serve` then ends."""
        self.force_exit = True
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def _config(settings: GatewaySettings, gateway: Gateway, tls: ssl.SSLContext | None) -> uvicorn.Config:
    config = uvicorn.Config(
        gateway.app(),
        http=connection_class(
            request_timeout_s=settings.request_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
            max_connections=addresses.max_connections(),
            tls=tls,
        ),
        ws="none",
        lifespan="off",
        loop="asyncio",
        # The gateway logs its requests itself.
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=settings.idle_timeout_s,
    )
    config.load()
    return config


def _bind(listen: str) -> socket.socket:
    host, port = parse_listen(listen)
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((host, port))
        # uvicorn does this later, when the address has been printed and clients may connect.
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise Unavailable(f"cannot listen on {listen}", reason="ADDRESS_UNAVAILABLE") from error
    return listener
