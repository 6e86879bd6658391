"""Sending spans to an OpenTelemetry collector, where one is named."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from opentelemetry import trace

from shared.errors import InvalidInput

log = structlog.get_logger("neap.rpc")


@contextmanager
def traces_exported(wanted: bool, service_name: str) -> Iterator[None]:
    """Exports this process' spans until left, then sends what is still held. Once per process; nothing if not `wanted`.

    Where to, how often, which share and with which headers the SDK reads itself from the standard OTEL_* variables: they are many,
    grow with its versions, and mean the same in every program. `service_name` holds unless they name another.
    Raises InvalidInput (reason BAD_CONFIGURATION) when the extra `neap[otel]` is not installed.
    """
    if not wanted:
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidInput(
            "OTEL_EXPORTER_OTLP_ENDPOINT asks for traces; sending them needs the extra: pip install 'neap[otel]'",
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
