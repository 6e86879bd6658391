"""The metadata of calls: their keys, and the context of the caller's trace.

Calls carry `traceparent` if the package opentelemetry-api is installed and a span is current. The W3C propagator is
used explicitly, because the API's global one depends on the environment.
"""

from collections.abc import Mapping, Sequence

try:
    from opentelemetry.trace.propagation import tracecontext
except ImportError:  # an optional dependency
    tracecontext = None  # type: ignore[assignment]

AUTHORIZATION_KEY = "authorization"
REQUEST_ID_KEY = "x-request-id"

Metadata = Sequence[tuple[str, str]]


def trace_context() -> Mapping[str, str]:
    """Return the current span's context as metadata (`traceparent`). Empty if there is no span or no OpenTelemetry."""
    carrier: dict[str, str] = {}
    if tracecontext is not None:
        tracecontext.TraceContextTextMapPropagator().inject(carrier)
    return carrier
