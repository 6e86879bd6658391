"""One HTTP connection: uvicorn's, with bounds on the time to send a request and to read a response, and on connections
of one peer."""

import asyncio
import json
import ssl
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_remote_addr

from neap_engine.gateway.clients import address_key
from neap_engine.gateway.errors import error_headers, error_object, gateway_full, http_status, refused
from shared.errors import Exhausted, NeapError
from shared.shares import Shares

# Bytes buffered here for a client that does not read, in addition to the kernel's buffer.
WRITE_BUFFER_BYTES = 16 * 1024
MAX_HEAD_BYTES = 64 * 1024


class _Requests(h11.Connection):
    """Refuses a request whose body has two lengths: another server may take the other one (RFC 9112, section 6.1)."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event


class Connection(H11Protocol):
    """uvicorn makes one for each connection, by `connection_class`. `scope["state"]["abort"]` closes it at once.

    A connection whose request has no complete head after `request_timeout_s` is closed, and so is one whose client
    reads nothing of what is left of a response for `stall_timeout_s`. A peer that has more than its share of
    `connections` gets 429, or, where it is to be asked for `tls` first, is closed: a connection counts from its
    beginning, so the handshake, which may take `request_timeout_s`, is done here and not by the event loop.
    """

    request_timeout_s: float
    stall_timeout_s: float
    connections_of_peers: Shares
    tls: ssl.SSLContext | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Requests(h11.SERVER, MAX_HEAD_BYTES)
        self.app_state = {**self.app_state, "abort": self._abort}
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._peer: str | None = None
        self._has_begun = False
        # What arrives with the end of the handshake.
        self._early = b""
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        address = get_remote_addr(transport)
        peer = address_key(address[0] if address else "")
        try:
            self.connections_of_peers.take(peer)
        except Exhausted as error:
            if self.tls is not None:
                transport.abort()
                return
            self._begin(transport)
            self._refuse(error)
            return
        self._peer = peer
        if self.tls is None:
            self._begin(transport)
            self._await_head()
        else:
            transport.pause_reading()
            self._handshake = self.loop.create_task(self._secure(transport, self.tls))

    def _begin(self, transport: asyncio.Transport) -> None:
        self._has_begun = True
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    async def _secure(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secured = await self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=self.request_timeout_s
            )
        except OSError:  # also of TLS, and of a peer that has gone
            secured = None
        if secured is None or secured.is_closing():
            transport.abort()
            self._give_back()
            return
        self._begin(secured)
        self._await_head()
        if self._early:
            self.data_received(self._early)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._give_back()
        if self._has_begun:
            super().connection_lost(exc)

    def _give_back(self) -> None:
        if self._peer is not None:
            self.connections_of_peers.give_back(self._peer)
            self._peer = None

    def eof_received(self) -> None:
        if self._has_begun:
            super().eof_received()

    def data_received(self, data: bytes) -> None:
        if not self._has_begun:
            self._early += data
            return
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            # From here on `Exchange` watches the request and its response.
            self._stop_timers()

    def on_response_complete(self) -> None:
        # First, because a request that has already arrived begins the next cycle here.
        self._await_reader(0)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, with OpenAI's error object instead of uvicorn's text."""
        self._refuse(refused(msg, reason="BAD_HTTP"))

    def _refuse(self, error: NeapError) -> None:
        """Answer with `error` instead of the application, and close the connection."""
        body = json.dumps({"error": error_object(error)}).encode()
        status = http_status(error)
        headers = [
            *error_headers(error).items(),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in (
                h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode()),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.request_timeout_s, self._abort)

    def _await_reader(self, num_before: int) -> None:
        """Abort if none of `num_before` bytes that were unread `stall_timeout_s` ago has been read since."""
        num_unread = self.transport.get_write_buffer_size()
        if num_before and num_unread >= num_before:
            self._abort()
        elif num_unread:
            self._read_timer = self.loop.call_later(self.stall_timeout_s, self._await_reader, num_unread)

    def _abort(self) -> None:
        self._stop_timers()
        self.transport.abort()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._read_timer = None


def connection_class(
    *, request_timeout_s: float, stall_timeout_s: float, max_connections: int, tls: ssl.SSLContext | None = None
) -> type[Connection]:
    """Return the class with these bounds. uvicorn passes no arguments of ours to it."""
    bounds = {
        "request_timeout_s": request_timeout_s,
        "stall_timeout_s": stall_timeout_s,
        "connections_of_peers": Shares(max_connections, "connections", gateway_full),
        "tls": tls,
    }
    return type("BoundedConnection", (Connection,), bounds)
