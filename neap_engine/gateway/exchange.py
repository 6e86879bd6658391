"""One HTTP request and its response: bounded reads and writes, and a watch for the client that goes."""

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from neap_client.channel import AUTHORIZATION_KEY, REQUEST_ID_KEY, Metadata
from opentelemetry.trace import Span
from starlette.types import Message, Receive, Scope, Send

from neap_engine.gateway.body import drop_body, read_body
from neap_engine.gateway.collected import as_json
from neap_engine.gateway.errors import error_headers, error_object, http_status
from shared.errors import Cancelled, Exhausted, NeapError, PermissionDenied, Unauthenticated, Unavailable
from shared.rpc.tracing import start_http_span
from shared.shares import Hold

# Proxies end connections that bring nothing for a minute.
KEEP_ALIVE_S = 15.0

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,120}")
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,8192}")


class Exchange:
    """`status` is the HTTP status that was sent, 0 before.

    A client has `request_timeout_s` to send the body. One that does not read for `stall_timeout_s` is cut off. A stream
    brings a comment wherever it would bring nothing for `KEEP_ALIVE_S`.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, request_timeout_s: float, stall_timeout_s: float
    ) -> None:
        self.scope = scope
        self.status = 0
        self.is_complete = False
        self.log_fields: dict[str, Any] = {}
        self._receive_message = receive
        self._send_message = send
        self._request_timeout_s = request_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._body_read = asyncio.Event()
        self._sent_s = 0.0
        self._keeping: asyncio.Task[None] | None = None
        asked = self._headers(REQUEST_ID_KEY)
        has_id = len(asked) == 1 and _REQUEST_ID.fullmatch(asked[0])
        self.request_id = asked[0] if has_id else secrets.token_hex(8)

    def start_span(self, route: str) -> Span:
        """Start the span of this request. Calls to workers made in this task or in its children continue its trace."""
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in self.scope["headers"]]
        return start_http_span(self.scope["method"], route, headers)

    @property
    def address(self) -> str:
        """The address of the peer, which may be a proxy."""
        client = self.scope.get("client")
        return str(client[0]) if client else ""

    async def read_body(self, hold: Hold, *, max_bytes: int) -> bytes:
        """See `neap_engine.gateway.body.read_body`."""
        timeout_s = self._request_timeout_s
        return await read_body(self.scope, self._receive, hold, max_bytes=max_bytes, timeout_s=timeout_s)

    def token(self) -> Metadata:
        """Return the client's token as metadata of calls to workers, empty if it has none.
        Raises Unauthenticated (TOKEN_MALFORMED)."""
        tokens = self._headers(AUTHORIZATION_KEY)
        if len(tokens) > 1 or any(not _PRINTABLE.fullmatch(token) for token in tokens):
            raise Unauthenticated("authorization must be a single 'Bearer TOKEN'", reason="TOKEN_MALFORMED")
        return [(AUTHORIZATION_KEY, token) for token in tokens]

    def check_origin(self, allowed: Collection[str]) -> None:
        """Raises PermissionDenied (ORIGIN_NOT_ALLOWED) if a browser says that a page of another host sends a request.
        It need not ask before it sends a text, and needs no answer to do harm."""
        hosts = [f"{scheme}://{host}" for host in self._headers("host") for scheme in ("http", "https")]
        for origin in self._headers("origin"):
            if self.scope["method"] == "POST" and not {origin, "*"}.intersection([*allowed, *hosts]):
                raise PermissionDenied(
                    f"pages of {origin[:200]} may not use this API; --cors-origin allows them",
                    reason="ORIGIN_NOT_ALLOWED",
                )

    async def run(self, handler: Callable[["Exchange"], Awaitable[None]], ending: asyncio.Event) -> None:
        """Await `handler`. Raises Cancelled (CLIENT_GONE) when the client goes, Unavailable (SHUTTING_DOWN) at
        `ending`."""
        work = asyncio.ensure_future(handler(self))
        gone = asyncio.create_task(self._client_gone())
        end = asyncio.create_task(ending.wait())
        try:
            await asyncio.wait((work, gone, end), return_when=asyncio.FIRST_COMPLETED)
            if work.done() or self.is_complete:
                await work
            elif end.done():
                raise Unavailable("the gateway is shutting down", reason="SHUTTING_DOWN")
            else:
                raise Cancelled("the client has closed the connection", reason="CLIENT_GONE")
        finally:
            tasks = [task for task in (work, gone, end, self._keeping) if task is not None]
            for task in tasks:
                task.cancel()
            # The calls to the workers end here.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def respond(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        """Send a whole response in JSON."""
        await self.respond_in_parts(status, [as_json(content)], headers)

    async def respond_in_parts(
        self, status: int, parts: Sequence[bytes], headers: dict[str, str] | None = None
    ) -> None:
        """Send a whole response, whose JSON is that of the parts together."""
        length = sum(map(len, parts))
        await self._start(
            status, {"content-type": "application/json", "content-length": str(length), **(headers or {})}
        )
        self.is_complete = True
        for index, part in enumerate(parts, 1):
            await self._send({"type": "http.response.body", "body": part, "more_body": index < len(parts)})

    async def start_stream(self, error_event: Callable[[dict[str, Any]], bytes]) -> None:
        """Send the head of a stream of server-sent events. Proxies are asked not to buffer it. `error_event`: its last
        event if it fails, made of the error object."""
        self._error_event = error_event
        await self._start(
            200,
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            },
        )
        self._keeping = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        while not self.is_complete:
            left_s = self._sent_s + KEEP_ALIVE_S - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self.send_events([b": waiting\n\n"])

    async def send_events(self, events: Iterable[bytes]) -> None:
        """Send events of a stream, or comments."""
        for event in events:
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end_stream(self) -> None:
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: NeapError) -> None:
        """Send `error`: as the response, or as the last event of a stream that has begun.
        Sends nothing to a client that is gone."""
        if error.reason in ("CLIENT_GONE", "SLOW_READER") or self.is_complete:
            return
        if error.reason not in ("REQUEST_TIMEOUT", "SHUTTING_DOWN"):
            await self._drop_body()
        content = {"error": error_object(error)}
        with suppress(Exhausted):
            if not self.status:
                # What is left of the body would be read as the next request.
                close = {} if self._body_read.is_set() else {"connection": "close"}
                await self.respond(http_status(error), content, error_headers(error) | close)
            else:
                await self.send_events([self._error_event(content["error"])])
                await self.end_stream()

    def _headers(self, name: str) -> list[str]:
        key = name.encode()
        return [value.decode("latin-1") for header, value in self.scope["headers"] if header == key]

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        raw = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
        raw.append((REQUEST_ID_KEY.encode(), self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, message: Message) -> None:
        """Send, waiting until the client has read enough of what came before. Raises Exhausted (SLOW_READER)."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send_message(message)
        except TimeoutError as error:
            abort = self.scope.get("state", {}).get("abort")
            if abort is not None:
                abort()
            raise Exhausted("the client does not read", reason="SLOW_READER") from error
        self._sent_s = time.monotonic()

    async def _receive(self) -> Message:
        message = await self._receive_message()
        if message["type"] == "http.request" and not message.get("more_body"):
            self._body_read.set()
        return message

    async def _drop_body(self) -> None:
        """Read what is left of the body. Many clients read no answer before they have sent all of it."""
        if not (self._body_read.is_set() or self._headers("expect")):
            await drop_body(self._receive, self._request_timeout_s)

    async def _client_gone(self) -> None:
        await self._body_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def expect_no_body(self) -> None:
        """The handler does not read a body, so the watch for the client may begin."""
        self._body_read.set()
