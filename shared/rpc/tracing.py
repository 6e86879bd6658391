"""OpenTelemetry spans of calls, following the semantic conventions for gRPC.

https://opentelemetry.io/docs/specs/semconv/rpc/grpc. Without an SDK (`export_traces`) spans are empty, but
the caller's trace id is still known and passed on. The W3C propagator is used explicitly, because the API's global one
depends on the environment.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.errors import InvalidInput

_PROPAGATOR = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("neap")
# The codes that the conventions count as server errors.
# The others (CANCELLED, NOT_FOUND, ...) may be the caller's fault.
_SERVER_ERRORS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))


def start_call_span(method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span:
    """Start the span of a call of `method` ("/package.Service/Method") as a child of the caller's span.

    The span is current for the rest of this task. The previous span is not restored, because gRPC creates a task per
    call and the call may end in the context of another task.
    """
    attributes = {"rpc.system.name": "grpc", "rpc.method": method.lstrip("/")}
    return _start_server_span(method.lstrip("/"), metadata, attributes)


def start_http_span(method: str, route: str, headers: Iterable[tuple[str, str]]) -> Span:
    """Start the span of an HTTP request in the same way.
    https://opentelemetry.io/docs/specs/semconv/http/http-spans/"""
    attributes = {"http.request.method": method, "http.route": route}
    return _start_server_span(f"{method} {route}", headers, attributes)


def _start_server_span(
    name: str, carrier: Iterable[tuple[str, str]] | Iterable[tuple[str, str | bytes]], attributes: Mapping[str, str]
) -> Span:
    texts = {key: value for key, value in carrier if isinstance(value, str)}
    parent = _PROPAGATOR.extract(texts, context=otel_context.Context())
    span = _tracer.start_span(name, context=parent, kind=SpanKind.SERVER, attributes=attributes)
    otel_context.attach(trace.set_span_in_context(span))
    return span


def end_http_span(span: Span, status: int, fields: Mapping[str, str | int | float]) -> None:
    """End the span of an HTTP request. `fields` become attributes "neap.<name>"."""
    span.set_attribute("http.response.status_code", status)
    for name, value in fields.items():
        span.set_attribute(f"neap.{name}", value)
    if status >= 500:
        span.set_attribute("error.type", str(status))
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def end_call_span(span: Span, code: str, fields: Mapping[str, str | int | float]) -> None:
    """End a call's span. `code` is the name of the gRPC status. `fields` become attributes "neap.<name>"."""
    span.set_attribute("rpc.response.status_code", code)
    for name, value in fields.items():
        span.set_attribute(f"neap.{name}", value)
    if code in _SERVER_ERRORS:
        span.set_attribute("error.type", code)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def record_span(name: str, start_s: float, end_s: float) -> None:
    """Record a child of the current span that has already ended. Times are in `time.monotonic()` seconds."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    span = _tracer.start_span(name, start_time=offset_ns + round(start_s * 1e9))
    span.end(offset_ns + round(max(start_s, end_s) * 1e9))


def set_gen_ai(attributes: Mapping[str, str | float | list[str] | None]) -> None:
    """Set attributes "gen_ai.<name>" of the current span; None: it has none.
    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/"""
    span = trace.get_current_span()
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(f"gen_ai.{name}", value)


def trace_id_of(span: Span) -> str:
    """Return the trace id as 32 hexadecimal digits, or "" if there is no trace."""
    context = span.get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


log = structlog.get_logger("neap.rpc")


@contextmanager
def export_traces(enabled: bool, service_name: str) -> Iterator[None]:
    """Export this process' spans until the block is left, then flush. Only once per process.
    Does nothing if not `enabled`.

    The SDK itself reads the endpoint, interval, sampling and headers from the standard OTEL_* variables. These are
    many, their number grows with its versions, and they mean the same in every program. They may also override
    `service_name`. Raises InvalidInput (reason BAD_CONFIGURATION) if the extra `neap-server[otel]` is not installed.
    """
    if not enabled:
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidInput(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but exporting traces needs an extra: pip install 'neap-server[otel]'",
            reason="BAD_CONFIGURATION",
        ) from error
    named = OTELResourceDetector().detect().attributes
    resource = Resource.create({"service.name": service_name, **named})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    log.info("exporting traces", service_name=str(resource.attributes["service.name"]))
    try:
        yield
    finally:
        provider.shutdown()
