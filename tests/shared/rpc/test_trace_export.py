"""Export of spans to a collector, tested in child processes because there is one tracer provider per process."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from shared.config import make_settings
from shared.errors import InvalidInput
from shared.rpc.tracing import export_traces
from shared.worker_settings import WorkerSettings
from tests.tiers import tiered

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from opentelemetry import trace
from shared.config import make_settings
from shared.worker_settings import WorkerSettings
from shared.errors import NeapError
from shared.rpc.logs import configure_logging
from shared.rpc.tracing import export_traces
configure_logging()
try:
    settings = make_settings(WorkerSettings)
    with export_traces(settings.exports_traces, "neap-worker"):
        with trace.get_tracer("test").start_as_current_span("work") as span:
            print(span.is_recording())
except NeapError as error:
    print(error.reason, error.message)
"""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []

    def Export(self, request, context):  # noqa: N802
        for resource in request.resource_spans:
            (service,) = [
                item.value.string_value for item in resource.resource.attributes if item.key == "service.name"
            ]
            self.received += [(service, span.name) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector():
    server = grpc.server(futures.ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(None)


def _run(program=PROGRAM, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("named", tiered(["", "mine"], {"mine"}))
def test_spans_reach_the_collector_under_the_services_name(collector, named):
    variables = {"OTEL_SERVICE_NAME": named} if named else {}
    assert _run(OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, **variables) == "True"
    assert collector.received == [(named or "neap-worker", "work")]


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., WorkerSettings]:
    """The settings with these variables of OpenTelemetry, and no others of it."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)

    def settings(variables: dict[str, str]) -> WorkerSettings:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return make_settings(WorkerSettings)

    return settings


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}],
    ids=str,
)
def test_nothing_is_exported_unless_an_endpoint_asks(settings_of, variables):
    assert not settings_of({}).exports_traces
    assert settings_of(ENDPOINT).exports_traces
    assert not settings_of(variables).exports_traces


@pytest.mark.parametrize(
    "variables", [{"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, {"OTEL_TRACES_EXPORTER": "zipkin"}]
)
def test_other_exporters_are_refused_only_where_one_is_wanted(settings_of, variables):
    assert not settings_of(variables).exports_traces
    with pytest.raises(InvalidInput) as raised:
        settings_of(ENDPOINT)
    assert raised.value.reason == "BAD_CONFIGURATION"


def test_without_the_extra_the_setting_is_an_error_that_names_it():
    program = "import sys\nsys.modules['opentelemetry.sdk.trace'] = None\n" + PROGRAM
    said = _run(program, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert said.startswith("BAD_CONFIGURATION")
    assert "neap-server[otel]" in said
    assert _run(program) == "False"


@pytest.mark.full
def test_an_unreachable_collector_does_not_delay_the_end():
    assert _run(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1") == "True"


def test_off_does_nothing():
    with export_traces(False, "x"):
        pass
