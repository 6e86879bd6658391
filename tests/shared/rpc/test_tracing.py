"""Spans of calls over real gRPC: names, parents and statuses. Each span ends, and none leaks into another call."""

import asyncio
import gc
import json
from types import SimpleNamespace

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from shared.errors import Corrupt, NeapError, NotFound
from shared.rpc.interceptors import ServiceInterceptor, annotate_call, current_request_id
from shared.rpc.logs import configure_logging
from tests.shared.rpc.conftest import begun_call
from tests.spans import recorded_spans

GET_MODEL = "neap.inference.v1.InferenceService/GetModel"
GENERATE = "neap.inference.v1.InferenceService/Generate"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
EVENT = inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text="x" * 1000))


@pytest.fixture
def spans():
    return recorded_spans()


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.target) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceServiceStub(channel)


def _trace_id(span):
    return trace.format_trace_id(span.context.trace_id)


def test_a_call_is_a_server_span_below_the_callers(scripted, stub, spans):
    scripted.on_get_model = lambda request, context: annotate_call(model_id="m", size=3)
    stub.GetModel(inference_pb2.GetModelRequest(), metadata=(("traceparent", TRACEPARENT),))
    spans.wait_for(lambda: spans.finished)
    (span,) = spans.finished
    assert (span.name, span.kind) == (GET_MODEL, SpanKind.SERVER)
    assert _trace_id(span) == TRACE
    assert trace.format_span_id(span.parent.span_id) == PARENT
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes)
    assert len(attributes.pop("neap.request_id")) == 16
    assert attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": GET_MODEL,
        "rpc.response.status_code": "OK",
        "neap.model_id": "m",
        "neap.size": 3,
    }


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
def test_without_a_usable_traceparent_a_trace_begins(stub, spans, traceparent):
    stub.GetModel(inference_pb2.GetModelRequest(), metadata=(("traceparent", traceparent),))
    stub.GetModel(inference_pb2.GetModelRequest())
    spans.wait_for(lambda: len(spans.finished) == 2)
    assert all(span.parent is None for span in spans.finished)
    assert len({_trace_id(span) for span in spans.finished}) == 2


@pytest.mark.parametrize(
    ("error", "code", "is_servers"),
    [
        (NotFound("no such"), "NOT_FOUND", False),
        (Corrupt("broken"), "DATA_LOSS", True),
        (RuntimeError("secret"), "INTERNAL", True),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_errors_end_the_span_with_their_code(scripted, stub, spans, error, code, is_servers, streaming):
    def get_model(request, context):
        raise error

    async def generate(request, context):
        yield EVENT
        raise error

    scripted.on_get_model, scripted.on_generate = get_model, generate
    method = (lambda request: list(stub.Generate(request))) if streaming else stub.GetModel
    with pytest.raises(grpc.RpcError):
        method(inference_pb2.GenerateRequest())
    spans.wait_for(lambda: spans.finished)
    (span,) = spans.finished
    assert span.attributes["rpc.response.status_code"] == code
    assert span.attributes.get("error.type") == (code if is_servers else None)
    assert span.status.status_code is (StatusCode.ERROR if is_servers else StatusCode.UNSET)
    if isinstance(error, NeapError):
        assert span.attributes["neap.reason"] == error.reason
    assert "secret" not in span.to_json()


@pytest.mark.parametrize("waits", [True, False], ids=["in an await", "in a yield"])
@pytest.mark.parametrize("code", ["CANCELLED", "DEADLINE_EXCEEDED"])
def test_calls_that_are_given_up_end_their_span(scripted, stub, spans, waits, code):
    async def generate(request, context):
        yield EVENT
        if waits:
            await asyncio.sleep(300)
        while True:  # until gRPC's buffers are full and the write waits
            yield EVENT

    scripted.on_generate = generate
    call = begun_call(stub, with_deadline=code == "DEADLINE_EXCEEDED")
    if code == "CANCELLED":
        call.cancel()

    def ended():
        gc.collect()
        return spans.finished

    spans.wait_for(ended)
    span = spans.finished[-1]
    assert span.attributes["rpc.response.status_code"] == code
    is_error = code == "DEADLINE_EXCEEDED"
    assert span.status.status_code is (StatusCode.ERROR if is_error else StatusCode.UNSET)


def test_interleaved_streams_keep_their_spans_and_fields_apart(scripted, stub, spans, capfd):
    """Each handler is in the middle of its stream while the other runs. They end in the order in which they began."""
    seen = []

    async def generate(request, context):
        name = request.model_id
        for number in range(20):
            own = trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)
            seen.append((name, own, current_request_id()))
            with trace.get_tracer("test").start_as_current_span(f"{name} {number}"):
                annotate_call(model_id=name, steps=number)
                await asyncio.sleep(0.002)
                yield EVENT
                await asyncio.sleep(0.002)

    def call(name, trace_id):
        metadata = (("traceparent", f"00-{trace_id}-{PARENT}-01"), ("x-request-id", name))
        return stub.Generate(inference_pb2.GenerateRequest(model_id=name), metadata=metadata)

    scripted.on_generate = generate
    configure_logging(json_lines=True)
    try:
        traces = {"first": "1" * 32, "second": "2" * 32}
        calls = [call(name, trace_id) for name, trace_id in traces.items()]
        for _ in zip(*calls, strict=True):
            pass
        spans.wait_for(lambda: len(spans.finished) == 42)
    finally:
        structlog.reset_defaults()
    names = [name for name, _, _ in seen]
    assert names != sorted(names), "the streams did not interleave"
    assert {(name, traces[name], name) for name in traces} == set(seen)
    servers = {span.attributes["neap.model_id"]: span for span in spans.named(GENERATE)}
    for name, trace_id in traces.items():
        assert _trace_id(servers[name]) == trace_id
        assert servers[name].attributes["neap.steps"] == 19
        for number in range(20):
            (child,) = spans.named(f"{name} {number}")
            assert child.parent.span_id == servers[name].context.span_id
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "call ended" in line]
    assert {(line["request_id"], line["model_id"], line["trace_id"]) for line in lines} == {
        (name, name, trace_id) for name, trace_id in traces.items()
    }


async def test_a_stream_given_up_in_a_write_is_closed_and_logged_under_its_own_ids(spans, capfd):
    """The client does not read and then cancels, so the handler waits inside gRPC and not in the generator."""
    writing, closed = asyncio.Event(), []

    async def inner(request, context):
        try:
            while True:
                yield EVENT
        finally:
            closed.append(True)

    async def read():
        return inference_pb2.GenerateRequest()

    async def write(response):
        structlog.contextvars.bind_contextvars(request_id="other", trace_id="other")
        writing.set()
        await asyncio.Event().wait()

    context = SimpleNamespace(
        invocation_metadata=lambda: (("x-request-id", "gone"), ("traceparent", TRACEPARENT)),
        set_trailing_metadata=lambda metadata: None,
        time_remaining=lambda: None,
        peer_identities=lambda: None,
        read=read,
        write=write,
    )
    interceptor = ServiceInterceptor()
    details = SimpleNamespace(method=f"/{GENERATE}", invocation_metadata=())

    async def handler_of(_):
        return grpc.unary_stream_rpc_method_handler(inner)

    handler = await interceptor.intercept_service(handler_of, details)
    configure_logging(json_lines=True)
    try:
        call = asyncio.create_task(handler.stream_stream(None, context))
        await writing.wait()
        assert len(interceptor.calls) == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    finally:
        structlog.reset_defaults()
    assert closed
    assert len(interceptor.calls) == 0
    (line,) = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (line["event"], line["code"]) == ("call ended", "CANCELLED")
    assert (line["request_id"], line["trace_id"]) == ("gone", TRACE)
    (span,) = spans.finished
    assert _trace_id(span) == TRACE


def test_health_checks_leave_no_span(channel, stub, spans):
    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    stub.GetModel(inference_pb2.GetModelRequest())
    spans.wait_for(lambda: spans.finished)
    assert [span.name for span in spans.finished] == [GET_MODEL]


def test_the_client_passes_its_span_on_and_nothing_without_one(scripted, server, spans):
    received = []

    async def generate(request, context):
        received.append(dict(context.invocation_metadata()))
        yield EVENT

    scripted.on_generate = generate
    scripted.on_get_model = lambda request, context: received.append(dict(context.invocation_metadata()))
    with NeapClient(server.target) as client:
        client.get_model("m")
        assert "traceparent" not in received[0]
        with trace.get_tracer("test").start_as_current_span("caller") as caller:
            client.get_model("m")
            assert len(list(client.generate(inference_pb2.GenerateRequest()))) == 1
    spans.wait_for(lambda: len(spans.finished) == 4)
    below = [span for span in spans.finished if span.parent is not None]
    assert {span.name for span in below} == {GET_MODEL, GENERATE}
    for span in below:
        assert span.parent.span_id == caller.get_span_context().span_id
