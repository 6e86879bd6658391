"""Exports trace spans to an OpenTelemetry collector, if one is configured."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from opentelemetry import trace

from shared.errors import InvalidInput

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
