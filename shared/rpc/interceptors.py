"""The interceptor around every call of a service: access check, request id, trace span, log line, and rich error
statuses."""

import asyncio
import inspect
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from neap_client.channel import REQUEST_ID_KEY
from opentelemetry.trace import INVALID_SPAN, Span

from shared.errors import RETRY_AFTER_S, Exhausted, InvalidInput, NeapError
from shared.rpc.access import Access
from shared.rpc.callers import Caller, certificate_caller, client_key, set_current_caller
from shared.rpc.calls import ClientWaits, OpenCalls
from shared.rpc.outline import FREE_BYTES, check_outline
from shared.rpc.status import code_of_status, to_status, trailing_metadata, unexpected_status
from shared.rpc.tracing import end_call_span, start_call_span, trace_id_of
from shared.shares import Shares

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_request_id: ContextVar[str] = ContextVar("neap_request_id", default="")
_fields: ContextVar[dict[str, str | int | float] | None] = ContextVar("neap_fields", default=None)
_waits: ContextVar[ClientWaits | None] = ContextVar("neap_client_waits", default=None)
_has_written: ContextVar[bool] = ContextVar("neap_has_written", default=False)
# Auxiliary services and methods: their calls are logged at info level only if they fail, and a drain does not wait for
# them.
SIDE_SERVICES = (
    "/grpc.health.",
    "/grpc.reflection.",
    *(f"/vllm.grpc.engine.VllmEngine/{name}" for name in ("HealthCheck", "GetLoads")),
)

# How long the first response of a call may still take once the call is ended.
# Only a client that does not read takes this long.
FIRST_RESPONSE_S = 0.5

# A client that reads nothing of a stream for so long has lost it. Generate has a limit of its own.
STALL_TIMEOUT_S = 30.0

# Memory for the answers to unary calls that clients have not read, all together. What a call takes, and an answer: as
# messages its parts are objects.
UNREAD_BYTES = 256 << 20
UNREAD_CALL_BYTES, UNREAD_FACTOR = 16 << 10, 8

# How a handler learns that the client is gone. `InternalError` comes from a write that failed just before the
# cancellation.
CLIENT_GONE = (asyncio.CancelledError, GeneratorExit, grpc.aio.InternalError)

log = structlog.get_logger("neap.rpc")


def current_request_id() -> str:
    """Return the id of the call that this task serves: the client's `x-request-id`, or a new id.
    Empty outside a call."""
    return _request_id.get()


def annotate_call(**fields: str | int | float) -> None:
    """Add `fields` to the log line and the span of the call that this task serves. Does nothing outside a call."""
    known = _fields.get()
    if known is not None:
        known.update(fields)


async def write_response(context: Any, response: Any, timeout_s: float | None = None) -> None:
    """Send a response in the call that this task serves, bounded by `ClientWaits.delivery`.
    Raises Exhausted (SLOW_READER)."""
    waits = _waits.get()
    assert waits is not None, "outside of a call"
    if _has_written.get():
        await waits.delivery(context.write(response), timeout_s)
    else:
        await waits.delivery(_write_first(context, response), timeout_s)
        _has_written.set(True)


async def _write_first(context: Any, response: Any) -> None:
    """Write the first response of a call. If this is cancelled, the write may still end within `FIRST_RESPONSE_S`.

    gRPC sends the initial metadata with it, and knows of that only when the write has ended. Otherwise `abort` would
    send them once more and fail, and the client would not get its status.
    """
    writing = asyncio.ensure_future(context.write(response))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing}, timeout=FIRST_RESPONSE_S)
        writing.cancel()
        raise


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps unary and streaming handlers that are coroutines or async generators.

    A NeapError becomes its gRPC status. Any other exception becomes INTERNAL with an id under which the traceback is
    logged. The request id is returned in the trailing metadata. `calls` tracks the running calls. `access` refuses
    calls before their message is awaited.

    Every method is registered with gRPC as one that takes a stream of requests. gRPC then calls the handler at once, so
    that `waits` can bound the wait for the message of a unary request and `calls` can end it.
    """

    def __init__(self, access: Access | None = None, waits: ClientWaits | None = None) -> None:
        self.calls = OpenCalls()
        self.waits = waits or ClientWaits()
        self._access = access or Access()
        # Who floods one kind of service must not keep others from asking whether the service is well.
        self._unread, self._unread_at_side = (
            Shares(UNREAD_BYTES, "bytes of answers that are not read", _unread_full) for _ in range(2)
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        access_decision = self._access.check_call(method, handler_call_details.invocation_metadata or ())
        unread = self._unread_at_side if method.startswith(SIDE_SERVICES) else self._unread
        wrapped = _Wrapped(
            method, self.calls, self.waits, unread, access_decision, takes_stream=handler.request_streaming
        )
        if handler.response_streaming:
            inner = handler.stream_stream or handler.unary_stream
            generates = inspect.isasyncgenfunction(inner)
            outer = wrapped.generator(inner) if generates else wrapped.coroutine(inner)
        else:
            # So the handler knows when its answer has been read. On the wire it is the same.
            outer = wrapped.answering(handler.stream_unary or handler.unary_unary)
        parse = handler.request_deserializer
        return grpc.stream_stream_rpc_method_handler(
            _without_frames(outer),
            request_deserializer=_unparsed if isinstance(access_decision, NeapError) else _checked(parse),
            response_serializer=handler.response_serializer,
        )


class _Wrapped:
    """Wraps the handler of one method.

    `access_decision` is the result of `Access.check_call`.
    With `takes_stream` the handler takes an iterator of requests instead of one request.
    """

    def __init__(
        self,
        method: str,
        calls: OpenCalls,
        waits: ClientWaits,
        unread: Shares,
        access_decision: Caller | NeapError | None = None,
        *,
        takes_stream: bool = False,
    ) -> None:
        self.method = method
        self.calls = calls
        self.waits = waits
        self._unread = unread
        self.access_decision = access_decision
        self._takes_stream = takes_stream

    def coroutine(self, inner: Any, run: Any = None) -> Any:
        """`run`: what calls `inner`, if something else does."""
        if not inspect.iscoroutinefunction(inner):
            # A plain function would block the event loop for every other call.
            raise TypeError(f"the handler of {self.method} is not a coroutine function")

        async def handle(_: Any, context: Any) -> Any:
            with self.calls.track_answer():
                async with _observed(self, context):
                    return await (run or inner)(await self._request(context), context)

        return handle

    def answering(self, inner: Any) -> Any:
        """A coroutine whose result is the answer. It counts among its client's until it has been read: gRPC would keep
        it for as long as the connection stays."""

        async def answer(request: Any, context: Any) -> None:
            response = await inner(request, context)
            with self._unread.holding(client_key(context)) as hold:
                hold(UNREAD_CALL_BYTES + UNREAD_FACTOR * response.ByteSize())
                await write_response(context, response)

        return self.coroutine(inner, answer)

    def generator(self, inner: Any) -> Any:
        """Wrap an async generator in a coroutine. With a generator, gRPC would wait for slow clients outside of
        `_observed`."""

        async def handle(_: Any, context: Any) -> None:
            with self.calls.track_answer():
                async with _observed(self, context):
                    request = await self._request(context)
                    async with aclosing(inner(request, context)) as responses:
                        async for response in responses:
                            await write_response(context, response, STALL_TIMEOUT_S)

        return handle

    async def _request(self, context: Any) -> Any:
        """Return the message, or the iterator of messages, after checking its form.
        Raises the errors of `ClientWaits` and `_well_formed`."""
        if self._takes_stream:
            return self._each_request(context)
        return _well_formed(await self.waits.only_request(context.read))

    async def _each_request(self, context: Any) -> AsyncIterator[Any]:
        while (message := await self.waits.request(context.read)) is not grpc.aio.EOF:
            yield _well_formed(message)


def _unread_full(what: str) -> Exhausted:
    return Exhausted(f"the service has {what}", reason="UNREAD_ANSWERS", retry_after_s=RETRY_AFTER_S)


@dataclass(frozen=True)
class _Refused:
    """A request that was not parsed. The handler refuses it, because gRPC itself would answer INTERNAL."""

    error: InvalidInput


def _unparsed(data: bytes) -> _Refused:
    return _Refused(_malformed())


def _checked(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def deserialize(data: bytes) -> Any:
        try:
            check_outline(parse.__self__, data)  # type: ignore[attr-defined]
            message = parse(data)
            # What a later member of a oneof replaced is kept as long as the message.
            return message if len(data) <= FREE_BYTES else parse(message.SerializeToString())
        except DecodeError:
            return _Refused(_malformed())
        except InvalidInput as error:
            return _Refused(error.with_traceback(None))

    return deserialize


def _well_formed(message: Any) -> Any:
    """Return `message`. Raises InvalidInput if it was not parsed."""
    if isinstance(message, _Refused):
        raise message.error
    return message


def _malformed() -> InvalidInput:
    return InvalidInput("the request is not a valid message (text must be UTF-8)", reason="MALFORMED_REQUEST")


@asynccontextmanager
async def _observed(call: _Wrapped, context: Any) -> AsyncIterator[None]:
    method, access_decision = call.method, call.access_decision
    request_id = _take_request_id(context)
    fields: dict[str, str | int | float] = {}
    ids = {"request_id": request_id}
    caller = access_decision if isinstance(access_decision, Caller) else certificate_caller(context)
    if caller is not None:
        ids["caller"] = caller.name
    if isinstance(access_decision, NeapError) and "caller" in access_decision.metadata:
        ids["caller"] = access_decision.metadata["caller"]  # authenticated, but not permitted
    is_quiet = method.startswith(SIDE_SERVICES)
    span: Span = INVALID_SPAN
    if not is_quiet:
        span = start_call_span(method, context.invocation_metadata() or ())
        if trace_id := trace_id_of(span):
            ids["trace_id"] = trace_id
    _request_id.set(request_id)
    _waits.set(call.waits)
    _has_written.set(False)
    set_current_caller(caller)
    _fields.set(fields)
    structlog.contextvars.bind_contextvars(**ids)
    context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
    started_s = time.monotonic()
    code = "OK"
    try:
        with call.calls.track_handler(method):
            if isinstance(access_decision, NeapError):
                fields["peer"] = context.peer()
                raise access_decision
            yield
    except grpc.aio.AbortError:
        code = _code_name(context)
        raise
    except CLIENT_GONE:
        remaining_s = context.time_remaining()
        expired = remaining_s is not None and remaining_s <= 0
        code = "DEADLINE_EXCEEDED" if expired else "CANCELLED"
        raise
    except NeapError as error:
        status = to_status(error)
        code, fields["reason"] = code_of_status(status).name, error.reason
        _forget_frames(error)
        await _abort(context, status, request_id)
    except Exception as error:
        error_id = secrets.token_hex(8)
        code, fields["error_id"] = "INTERNAL", error_id
        log.exception("unexpected error", method=method, error_id=error_id, **ids)
        _forget_frames(error)
        await _abort(context, unexpected_status(error_id), request_id)
    finally:
        end_call_span(span, code, {**fields, "request_id": request_id})
        # The ids are passed again because the handler may have changed the bound context variables.
        (log.debug if is_quiet and code == "OK" else log.info)(
            "call ended", method=method, code=code, duration_s=round(time.monotonic() - started_s, 6), **fields, **ids
        )


def _without_frames(handle: Any) -> Any:
    """`handle`, whose end is known without the frames that led to it: those of the context managers around a handler
    know what it has raised, with the frames of that."""

    async def handle_call(requests: Any, context: Any) -> Any:
        try:
            return await handle(requests, context)
        except grpc.aio.AbortError as ended:
            raise ended.with_traceback(None) from None

    return handle_call


def _forget_frames(error: BaseException) -> None:
    """An error, its frames and what they hold refer to one another, so that the request itself, hundreds of MB once it
    is parsed, would wait for a full collection."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__, found = None, found.__cause__ or found.__context__


async def _abort(context: Any, status: Any, request_id: str) -> None:
    await context.abort(
        code_of_status(status),
        status.message,
        trailing_metadata=((REQUEST_ID_KEY, request_id), *trailing_metadata(status)),
    )


def _take_request_id(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(8)


def _code_name(context: Any) -> str:
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((known.name for known in grpc.StatusCode if known.value[0] == code), "UNKNOWN")
