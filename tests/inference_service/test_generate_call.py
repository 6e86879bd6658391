"""The counts, the log line and the spans of one Generate call over real gRPC."""

import asyncio
import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import grpc
import pytest
import structlog
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service import servicer
from inference_service.generate_call import EventStream, Wakeups
from inference_service.metrics import WorkerMetrics
from shared.engine.request.request import Exit, GeneratedToken, TokenChunk
from shared.errors import Exhausted, NeapError
from shared.ladder.artefact import pack_ladder
from shared.registry.factory import open_registry
from shared.rpc.logs import configure_logging
from tests.fixed_costs import fixed_cost_engine
from tests.generation import EXACT, request_of
from tests.spans import recorded_spans
from tests.waiting import wait_until
from tests.worker import build_ladder, serving

GENERATE = "neap.inference.v1.InferenceService/Generate"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
METADATA = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"), ("x-request-id", "mine"))


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    yield registry
    registry.close()


@pytest.fixture
def metrics():
    return WorkerMetrics()


@pytest.fixture
def worker(request, loaded, registry, metrics, clock):
    """Its parameter, if any, has further arguments of the engine."""
    options = {"clock": lambda: time.monotonic() + clock.later_s, **getattr(request, "param", {})}
    with fixed_cost_engine(loaded, **options) as engine:
        engine.warm_up()
        with serving(engine, registry, metrics=metrics) as worker:
            yield worker


@pytest.fixture
def stub(worker):
    with grpc.insecure_channel(worker.target) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture
def spans():
    return recorded_spans()


@pytest.fixture
def log_lines(capfd):
    """Waits for those of so many calls, which are logged a moment after their spans have ended."""
    configure_logging(json_lines=True)
    lines = []

    def has(count):
        written = capfd.readouterr().err.splitlines()
        lines.extend(json.loads(line) for line in written if '"call ended"' in line)
        return len(lines) >= count

    def wait(count):
        wait_until(lambda: has(count))
        return lines

    yield wait
    structlog.reset_defaults()


def _request(max_tokens=6, **changes):
    return request_of(max_tokens, **{"text": "hello there", **changes})


def _ended(metrics):
    """{(kind, model, reason): number of calls}, of those that there were."""
    found = {}
    for kind in ("request_success", "requests_rejected", "request_failures"):
        for family in getattr(metrics, kind).collect():
            for sample in family.samples:
                labels = sample.labels
                reason = labels.get("reason") or labels.get("finished_reason")
                found[kind, labels["model_id"], reason] = sample.value
    return {key: value for key, value in found.items() if value}


def _value(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, {"model_id": "tiny", **labels})


def test_an_answered_call(stub, metrics, spans, log_lines, loaded):
    *_, last = stub.Generate(_request(), metadata=METADATA)
    spans.wait_for(lambda: spans.named(GENERATE))
    num_prompt = last.finished.usage.num_prompt_tokens
    assert _ended(metrics) == {("request_success", "tiny", "length"): 1}
    assert _value(metrics, "neap_time_to_first_token_seconds_count") == 1
    assert _value(metrics, "neap_e2e_request_latency_seconds_count") == 1
    first_s = _value(metrics, "neap_time_to_first_token_seconds_sum")
    assert 0 < first_s <= _value(metrics, "neap_e2e_request_latency_seconds_sum")
    assert _value(metrics, "neap_prompt_tokens_total") == num_prompt
    assert _value(metrics, "neap_generation_tokens_total") == 6
    assert _value(metrics, "neap_exits_total", proposer="full") == 6
    assert _value(metrics, "neap_layer_executions_total") == 5 * loaded.num_layers
    assert _value(metrics, "neap_inter_token_latency_seconds_count") == 5
    assert _value(metrics, "neap_engine_step_batch_size_bucket", le="1.0") == 6
    assert _value(metrics, "neap_engine_step_batch_size_bucket", le="+Inf") == 6
    assert _value(metrics, "neap_request_queue_time_seconds_count") == 1
    assert _value(metrics, "neap_router_version") is None  # none was needed

    (line,) = log_lines(1)
    expected = {
        "request_id": "mine",
        "trace_id": TRACE,
        "code": "OK",
        "model_id": "tiny",
        "router_version": 0,
        "prompt_tokens": num_prompt,
        "generated_tokens": 6,
        "finish_reason": "length",
    }
    assert {name: line.get(name) for name in expected} == expected
    assert line["ttft_s"] == pytest.approx(first_s, abs=1e-6)
    assert line["ttft_s"] < line["duration_s"]

    (server,) = spans.named(GENERATE)
    assert server.attributes["neap.generated_tokens"] == 6
    prefix = "gen_ai."
    assert {name.removeprefix(prefix): v for name, v in server.attributes.items() if name.startswith(prefix)} == {
        "operation.name": "text_completion",
        "provider.name": "neap",
        "request.model": "tiny",
        "request.max_tokens": 6,
        "request.temperature": 0.0,
        "request.top_p": 1.0,
        "request.top_k": 0,
        "request.frequency_penalty": 0.0,
        "request.presence_penalty": 0.0,
        "response.id": "mine",
        "response.model": "tiny",
        "response.finish_reasons": ("length",),
        "usage.input_tokens": num_prompt,
        "usage.output_tokens": 6,
        "usage.cache_read.input_tokens": 0,
    }
    children = [spans.named(name)[0] for name in ("queue", "prefill", "decode")]
    for child in children:
        assert child.parent.span_id == server.context.span_id
        assert server.start_time <= child.start_time <= child.end_time <= server.end_time
    assert children[0].end_time == pytest.approx(children[1].start_time, abs=1e6)
    assert children[1].end_time == pytest.approx(children[2].start_time, abs=1e6)
    assert len(spans.finished) == 4


def test_the_default_routers_version_is_shown(stub, metrics, registry, worker, log_lines):
    manifest, blobs = pack_ladder(build_ladder(worker.engine.loaded), {})
    version = registry.publish("tiny", manifest, blobs, request_id="one").version
    other = registry.publish("tiny", manifest, blobs, request_id="two", aliases=()).version
    list(stub.Generate(_request(depth=EXACT)))
    assert _value(metrics, "neap_router_version") == version
    list(stub.Generate(_request(depth=EXACT, router=pb.RouterSelector(version=other))))
    assert _value(metrics, "neap_router_version") == version
    assert [line["router_version"] for line in log_lines(2)] == [version, other]


def test_rejections_count_by_reason_and_strangers_names_become_no_label(stub, metrics, log_lines):
    requests = [_request(model_id=f"stranger-{number}") for number in range(20)]
    requests += [_request(text=""), _request(max_tokens=10**6)]
    for request in requests:
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(request))
    wait_until(lambda: sum(_ended(metrics).values()) == 22)
    assert _ended(metrics) == {
        ("requests_rejected", "", "MODEL_NOT_FOUND"): 20,
        ("requests_rejected", "tiny", "EMPTY_PROMPT"): 1,
        ("requests_rejected", "tiny", "MAX_TOKENS_TOO_LARGE"): 1,
    }
    models = {
        sample.labels["model_id"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if "model_id" in sample.labels
    }
    assert models == {"", "tiny"}


@pytest.fixture
def clock():
    """The time of the engine that `worker` runs: real time and `later_s`."""
    return SimpleNamespace(later_s=0.0)


@pytest.mark.parametrize("code", ["CANCELLED", "DEADLINE_EXCEEDED"])
def test_calls_that_end_early_count_once_and_end_their_spans(stub, worker, clock, metrics, spans, log_lines, code):
    """The client cancels, or the clock of the engine passes the deadline that the client has set."""
    call = stub.Generate(_request(2000), metadata=METADATA, timeout=1000)
    first, second = next(call), next(call)
    assert first.HasField("started")
    assert second.HasField("chunk")
    if code == "CANCELLED":
        call.cancel()
    else:
        clock.later_s = 2000.0  # gRPC may round the 1,000 seconds up to 1,010
    spans.wait_for(lambda: spans.named(GENERATE))
    assert _ended(metrics) == {("request_failures", "tiny", code): 1}
    wait_until(lambda: worker.engine.num_running == 0)
    (line,) = log_lines(1)
    assert line["code"] == code
    assert 0 < line["generated_tokens"] < 2000
    assert "finish_reason" not in line
    assert [span.name for span in spans.finished] == ["queue", "prefill", "decode", GENERATE]
    assert _value(metrics, "neap_e2e_request_latency_seconds_count") is None


def test_a_write_that_fails_as_the_client_goes_counts_as_cancelled(stub, metrics, monkeypatch):
    async def fails(*_):
        raise grpc.aio.InternalError('Failed "execute_batch"')

    monkeypatch.setattr(servicer, "write_response", fails)
    with pytest.raises(grpc.RpcError):
        list(stub.Generate(_request(2000)))
    assert _ended(metrics) == {("request_failures", "tiny", "CANCELLED"): 1}


def test_a_call_cancelled_while_it_waits_has_a_queue_span_only(stub, metrics, spans, worker):
    scheduler = worker.engine._loop.scheduler
    scheduler.limits = replace(scheduler.limits, max_running=0)
    call = stub.Generate(_request())
    assert next(call).HasField("started")
    wait_until(lambda: _value(metrics, "neap_num_requests_waiting") == 1)
    call.cancel()
    spans.wait_for(lambda: spans.named(GENERATE))
    assert [span.name for span in spans.finished] == ["queue", GENERATE]
    assert _ended(metrics) == {("request_failures", "tiny", "CANCELLED"): 1}
    wait_until(lambda: _value(metrics, "neap_num_requests_waiting") == 0)


def test_concurrent_calls_keep_their_spans_apart(stub, spans):
    traces = [f"{number:032x}" for number in range(1, 5)]
    calls = [
        stub.Generate(_request(20), metadata=(("traceparent", f"00-{name}-00f067aa0ba902b7-01"),)) for name in traces
    ]
    for _ in zip(*calls, strict=False):
        pass
    spans.wait_for(lambda: len(spans.named(GENERATE)) == 4)
    servers = {span.context.span_id: span.context.trace_id for span in spans.named(GENERATE)}
    assert {f"{trace_id:032x}" for trace_id in servers.values()} == set(traces)
    for name in ("queue", "prefill", "decode"):
        children = spans.named(name)
        assert {child.parent.span_id for child in children} == set(servers)
        for child in children:
            assert child.context.trace_id == servers[child.parent.span_id]


class Handle:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def cancel(self) -> None:
        self.calls.append("cancel")


def _chunks(number):
    return [TokenChunk((str(index),)) for index in range(number)]


def _prompt_scores(number):
    return [TokenChunk(prompt=(GeneratedToken(5, 4, "prompt", -1.0),))] * number


async def test_events_cross_threads_in_order_and_end_with_none():
    stream, events = EventStream(Wakeups()), _chunks(200)
    stream.attach(Handle())

    def steps() -> None:
        for number, event in enumerate([*events, None]):
            stream.push(event)
            if number % 3 == 2:  # 200 and None end with a whole step
                stream.wakeups.wake()

    thread = threading.Thread(target=steps)
    thread.start()
    got = []
    while (event := await asyncio.wait_for(stream.next(), 60)) is not None:
        got.append(event)
    assert TokenChunk.joined(got) == TokenChunk.joined(events)
    thread.join()


async def test_a_step_wakes_the_loop_once_for_all_its_readers(monkeypatch):
    wakeups, calls = Wakeups(), []
    loop = asyncio.get_running_loop()
    called = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: calls.append(called(*given)))
    streams = [EventStream(wakeups) for _ in range(5)]
    readers = [asyncio.create_task(stream.next()) for stream in streams]
    await asyncio.sleep(0)
    for stream in streams[:4]:
        stream.push(*_chunks(1))
    wakeups.wake()
    await asyncio.wait_for(asyncio.gather(*readers[:4]), 60)
    assert len(calls) == 1
    assert not readers[4].done()
    readers[4].cancel()


async def test_a_full_stream_pauses_and_half_of_it_resumes():
    stream, handle = EventStream(Wakeups(), capacity=4), Handle()
    stream.attach(handle)
    for event in _prompt_scores(3):
        stream.push(event)
    assert handle.calls == []
    for event in _prompt_scores(2):
        stream.push(event)
    assert handle.calls == ["pause"]
    # What belongs to the prompt is not joined with anything.
    assert [await stream.next() for _ in range(2)] == _prompt_scores(2)
    assert handle.calls == ["pause"]
    await stream.next()
    assert handle.calls == ["pause", "resume"]
    for event in _prompt_scores(2):
        stream.push(event)
    assert handle.calls == ["pause", "resume", "pause"]


async def test_a_reader_that_is_behind_gets_all_chunks_of_the_answer_as_one():
    chunk, stream = TokenChunk(("a",), (7,), (Exit(4, "full"),)), EventStream(Wakeups())
    for event in (*_prompt_scores(1), *[chunk] * 3, NeapError("x"), None):
        stream.push(event)
    joined = TokenChunk(("a",) * 3, (7,) * 3, chunk.exits * 3)
    assert [await stream.next() for _ in range(2)] == [*_prompt_scores(1), joined]
    with pytest.raises(NeapError):
        await stream.next()
    assert await stream.next() is None


async def test_events_before_the_handle_count():
    stream, handle = EventStream(Wakeups(), capacity=2), Handle()
    for event in _chunks(2):
        stream.push(event)
    stream.attach(handle)
    assert handle.calls == ["pause"]


async def test_errors_are_raised_where_they_stand():
    stream = EventStream(Wakeups())
    stream.push(*_chunks(1))
    stream.push(Exhausted("full"))
    assert await stream.next() == _chunks(1)[0]
    with pytest.raises(Exhausted):
        await stream.next()


@pytest.mark.parametrize("close_first", [True, False])
async def test_closing_cancels_whenever_the_handle_comes(close_first):
    stream, handle = EventStream(Wakeups(), capacity=1), Handle()
    if close_first:
        stream.close()
        stream.attach(handle)
    else:
        stream.attach(handle)
        stream.close()
    stream.push(*_chunks(1))
    stream.wakeups.wake()
    assert handle.calls == ["cancel"]


def test_a_loop_that_is_gone_cancels():
    async def make():
        return EventStream(Wakeups())

    stream, handle = asyncio.run(make()), Handle()
    stream.attach(handle)
    stream.push(*_chunks(1))
    stream.wakeups.wake()
    assert handle.calls == ["cancel"]
