"""What a worker answers to input that cannot work, through real gRPC on loopback."""

import gc
import math
import time
from itertools import pairwise
from types import SimpleNamespace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from neap.inference.v1 import inference_pb2 as pb
from neap.inference.v1 import inference_pb2_grpc

from inference_service.convert import to_generation_request
from inference_service.engine.engine import Engine
from inference_service.servicer import InferenceServicer
from shared.errors import DeadlineExceeded, Exhausted
from shared.ladder.artefact import pack_ladder
from shared.model.cache import SlotCache
from shared.model.load import load_model
from shared.registry.factory import open_registry
from tests.worker import CONTEXT_LENGTH, build_ladder, save_model, serving

FULL = pb.DepthPolicy(full=pb.Full())
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"))
    with Engine(load_model(folder, model_id="tiny"), max_queue=4) as engine:
        engine.warm_up()
        yield engine


@pytest.fixture
def registry(tmp_path):
    registry = open_registry(str(tmp_path / "registry"))
    yield registry
    registry.close()


@pytest.fixture
def worker(engine, registry):
    with serving(engine, registry) as worker:
        yield worker


@pytest.fixture
def stub(worker):
    # A small window: what a client that does not read lets pile up is then small, too.
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 4096),
    ]
    with grpc.insecure_channel(worker.target, options=options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def _publish(registry, engine, **identity):
    manifest, blobs = pack_ladder(build_ladder(engine.loaded, **identity), {})
    return registry.publish("tiny", manifest, blobs, request_id="one")


def _request(**changes):
    fields = {"model_id": "tiny", "text": "hello", "depth": FULL, **changes}
    if "token_ids" in changes or "chat" in changes:
        del fields["text"]
    return pb.GenerateRequest(**fields)


def _refused(stub, request, **call):
    """(code, ErrorInfo, message) of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=call.pop("timeout", 30), **call))
    return _explained(caught.value)


def _explained(error):
    status = rpc_status.from_call(error)
    assert status is not None, f"no rich error: {error}"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "neap"
    assert status.code == error.code().value[0]
    return error.code(), info, status.message


def _answer(stub, request, **call):
    """(Started, tokens, chunk texts, Finished) of a call that must succeed."""
    first, *middle, last = stub.Generate(request, timeout=60, **call)
    assert first.WhichOneof("event") == "started"
    assert last.WhichOneof("event") == "finished"
    chunks = [event.chunk for event in middle]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return first.started, tokens, [chunk.text for chunk in chunks], last.finished


def _wait_for(condition, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


# models and routers


def test_unknown_model(stub):
    code, info, message = _refused(stub, _request(model_id="nobody"))
    assert (code, info.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    assert "tiny" in message
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetModel(pb.GetModelRequest(model_id="nobody"))
    assert _explained(caught.value)[1].reason == "MODEL_NOT_FOUND"


def test_full_needs_no_router_and_exact_says_how_to_get_one(stub):
    started, tokens, _, finished = _answer(stub, _request(stopping=pb.Stopping(max_tokens=3)))
    assert (started.router_version, started.router_digest) == (0, "")
    assert len(tokens) == finished.usage.num_completion_tokens == 3
    for depth in (pb.DepthPolicy(), pb.DepthPolicy(relaxed=pb.Relaxed())):
        code, info, message = _refused(stub, _request(depth=depth))
        assert (code, info.reason) == (Code.FAILED_PRECONDITION, "ROUTER_REQUIRED")
        assert "neap calibrate" in message


@pytest.mark.parametrize(
    "selector", [pb.RouterSelector(version=7), pb.RouterSelector(alias="nobody")], ids=str
)
def test_unknown_router_version(stub, engine, registry, selector):
    _publish(registry, engine)
    code, info, _ = _refused(stub, _request(depth=pb.DepthPolicy(), router=selector))
    assert code is Code.NOT_FOUND
    assert info.reason in ("ROUTER_VERSION_NOT_FOUND", "ALIAS_NOT_FOUND")


def test_started_names_the_resolved_router(stub, engine, registry):
    published = _publish(registry, engine)
    stopping = pb.Stopping(max_tokens=40, ignore_eos=True)
    request = _request(depth=pb.DepthPolicy(), stopping=stopping)
    started, exact_tokens, _, finished = _answer(stub, request)
    assert started.router_version == published.version == 1
    assert started.router_digest == published.manifest_digest
    assert finished.depth.num_drafted > 0
    _, full_tokens, _, _ = _answer(stub, _request(stopping=stopping))
    assert [token.id for token in exact_tokens] == [token.id for token in full_tokens]
    model = stub.GetModel(pb.GetModelRequest(model_id="tiny")).model
    (router,) = model.routers
    assert (router.version, router.manifest_digest) == (1, published.manifest_digest)
    assert list(router.rungs) == ["suffix"]


def test_router_of_another_model(stub, engine, registry):
    _publish(registry, engine, fingerprint="sha256:" + "0" * 64)
    code, info, _ = _refused(stub, _request(depth=pb.DepthPolicy()))
    assert (code, info.reason) == (Code.FAILED_PRECONDITION, "ROUTER_MISMATCH")
    assert info.metadata["router_fingerprint"] == "sha256:" + "0" * 64
    assert info.metadata["model_fingerprint"] == engine.loaded.fingerprint


def test_corrupt_blob(stub, engine, registry, tmp_path):
    published = _publish(registry, engine)
    (entry,) = published.manifest["blobs"].values()
    hexadecimal = entry["digest"].removeprefix("sha256:")
    (blob,) = [
        path
        for path in (tmp_path / "registry" / "blobs").rglob("*")
        if path.is_file() and hexadecimal.endswith(path.name)
    ]
    whole = blob.read_bytes()
    blob.chmod(0o644)
    for position in (0, len(whole) - 1):
        broken = bytearray(whole)
        broken[position] ^= 1
        blob.write_bytes(broken)
        code, info, _ = _refused(stub, _request(depth=pb.DepthPolicy()))
        assert code is Code.DATA_LOSS
        assert info.reason
    blob.write_bytes(whole)
    _answer(stub, _request(depth=pb.DepthPolicy(), stopping=pb.Stopping(max_tokens=1)))


# requests that can never work


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"text": ""}, "EMPTY_PROMPT"),
        ({"token_ids": pb.TokenIds()}, "EMPTY_PROMPT"),
        ({"chat": pb.Chat()}, "EMPTY_PROMPT"),
        ({"token_ids": pb.TokenIds(ids=[1] * CONTEXT_LENGTH)}, "PROMPT_TOO_LONG"),
        ({"text": "x" * (CONTEXT_LENGTH + 1)}, "PROMPT_TOO_LONG"),
        ({"stopping": pb.Stopping(max_tokens=CONTEXT_LENGTH)}, "MAX_TOKENS_TOO_LARGE"),
        ({"stopping": pb.Stopping(max_tokens=0)}, "INVALID_INPUT"),
        ({"sampling": pb.Sampling(temperature=-0.5)}, "INVALID_INPUT"),
        ({"sampling": pb.Sampling(temperature=math.nan)}, "INVALID_INPUT"),
        ({"sampling": pb.Sampling(top_p=math.nan)}, "INVALID_INPUT"),
        ({"sampling": pb.Sampling(top_k=0)}, "INVALID_INPUT"),
        ({"token_ids": pb.TokenIds(ids=[2**32 - 1])}, "TOKEN_OUT_OF_RANGE"),
        ({"stopping": pb.Stopping(stop_token_ids=[2**32 - 1])}, "INVALID_INPUT"),
        ({"chat": pb.Chat(messages=[pb.ChatMessage(role="robot")])}, "UNKNOWN_ROLE"),
        ({"depth": pb.DepthPolicy(min_layers=99, full=pb.Full())}, "INVALID_INPUT"),
        ({"logprobs": 21}, "INVALID_INPUT"),
    ],
)
def test_invalid_arguments(stub, engine, changes, reason):
    code, info, message = _refused(stub, _request(**changes))
    assert (code, info.reason) == (Code.INVALID_ARGUMENT, reason)
    assert message
    assert engine.num_running == engine.num_waiting == 0


@pytest.mark.parametrize("form", ["text", "token_ids"])
def test_a_prompt_of_10_mb_is_refused_at_once(stub, form):
    if form == "text":
        request = _request(text="a" * 10_000_000)
    else:
        request = _request(token_ids=pb.TokenIds(ids=[97] * 10_000_000))
    started_s = time.monotonic()
    code, info, message = _refused(stub, request)
    assert (code, info.reason) == (Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert str(CONTEXT_LENGTH) in message
    assert time.monotonic() - started_s < 10


# text


def _sampled(stub, seed, **stopping):
    return _answer(
        stub,
        _request(
            sampling=pb.Sampling(temperature=1.5, seed=seed),
            stopping=pb.Stopping(max_tokens=60, ignore_eos=True, **stopping),
        ),
    )


def test_a_stop_string_that_spans_two_tokens(stub):
    for seed in range(50):
        _, _, texts, finished = _sampled(stub, seed)
        whole = "".join(texts) + finished.text
        for left, right in pairwise(texts):
            stop = left[-1:] + right[:1]
            if len(stop) == 2 and stop.isascii() and stop.isprintable() and whole.count(stop) == 1:
                _, _, cut_texts, cut = _sampled(stub, seed, stop_strings=["never so", stop])
                assert cut.reason == pb.FINISH_REASON_STOP_STRING
                assert cut.stop_match == stop
                assert "".join(cut_texts) + cut.text == whole[: whole.index(stop)]
                return
    pytest.fail("no two tokens made a stop string")


def test_a_stop_string_that_never_comes_is_given_back(stub):
    _, _, texts, finished = _sampled(stub, 1)
    whole = "".join(texts) + finished.text
    stop = whole[-1] + "never"
    _, _, held_texts, held = _sampled(stub, 1, stop_strings=[stop])
    assert "".join(held_texts) + held.text == whole
    assert held.text.endswith(whole[-1])
    assert held.reason == pb.FINISH_REASON_LENGTH


def test_text_never_splits_a_character(stub, engine):
    num_characters = 0
    for seed in range(6):
        _, tokens, texts, finished = _sampled(stub, seed)
        ids = [token.id for token in tokens]
        whole = engine.loaded.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert "".join(texts) + finished.text == whole
        # A character whose bytes may still come is held back, so U+FFFD never ends a chunk.
        assert not any(text.endswith("\ufffd") for text in texts)
        num_characters += sum(ord(character) > 127 and character != "\ufffd" for character in whole)
    assert num_characters > 0


def test_token_ids_that_are_broken_utf8_are_a_prompt_like_any_other(stub, engine):
    snowman = engine.loaded.tokenizer("\u2603")["input_ids"]
    assert len(snowman) == 3
    for ids in (snowman[:1], snowman[1:], snowman[::-1]):
        request = _request(token_ids=pb.TokenIds(ids=ids), stopping=pb.Stopping(max_tokens=2))
        started, tokens, _, _ = _answer(stub, request)
        assert started.num_prompt_tokens == len(ids)
        assert len(tokens) == 2


# deadlines, cancellation, slow readers


@pytest.fixture
def handles(engine, monkeypatch):
    """Every handle the engine gives out, and `steps`: whether its request was cancelled when a step began."""
    seen = SimpleNamespace(handles=[], steps=[])
    submit, step = engine.submit, engine._decoder.step

    def submitting(*args, **options):
        handle = submit(*args, **options)
        seen.handles.append(handle)
        return handle

    def stepping(sequence, costs):
        seen.steps.append(any(handle.is_cancelled for handle in seen.handles))
        return step(sequence, costs)

    monkeypatch.setattr(engine, "submit", submitting)
    monkeypatch.setattr(engine._decoder, "step", stepping)
    return seen


LONG = pb.Stopping(max_tokens=2000, ignore_eos=True)


@pytest.mark.parametrize("timeout_s", [0, -1])
def test_a_deadline_already_past(stub, handles, timeout_s):
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(_request(), timeout=timeout_s))
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    assert handles.handles == []


async def test_a_deadline_that_passed_on_the_way_is_refused_before_the_work(worker, handles):
    context = SimpleNamespace(time_remaining=lambda: -0.001)
    servicer: InferenceServicer = worker.servicer
    # Not even the prompt is looked at: this one would be refused for being empty.
    with pytest.raises(DeadlineExceeded):
        await servicer.Generate(_request(text=""), context)
    assert handles.handles == []


def test_a_deadline_in_the_middle_frees_the_slot(stub, engine, handles):
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(_request(stopping=LONG), timeout=0.5))
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    _wait_for(lambda: engine.num_running == 0, 1.0)
    (handle,) = handles.handles
    assert 0 < handle.request.deadline_s - time.monotonic() + 10 < 10.5
    assert 0 < len(handles.steps) < 1900


def test_cancel_in_the_middle_frees_the_slot_within_one_step(stub, engine, handles):
    call = stub.Generate(_request(stopping=LONG))
    for _ in range(4):
        next(call)
    assert engine.num_running == 1
    call.cancel()
    _wait_for(lambda: engine.num_running == 0, 2.0)
    assert handles.handles[0].is_cancelled
    num_steps = len(handles.steps)
    assert handles.steps.count(True) <= 1
    time.sleep(0.1)
    assert len(handles.steps) == num_steps < 1900


def _stalled_call(stub, **options):
    """A call whose responses are large and not read; returns once it has started."""
    call = stub.Generate(_request(stopping=LONG, logprobs=20), **options)
    next(call)
    return call


def test_a_client_that_stops_reading_pauses_only_itself(stub, engine, handles):
    call = _stalled_call(stub)
    (handle,) = handles.handles
    _wait_for(lambda: handle.is_paused, 20.0)
    num_steps = len(handles.steps)
    assert num_steps < 1900
    time.sleep(0.2)
    assert len(handles.steps) <= num_steps + 1
    # Others are served meanwhile.
    _, tokens, _, _ = _answer(stub, _request(stopping=pb.Stopping(max_tokens=5)))
    assert len(tokens) == 5
    # And it goes on where it was.
    read = 0
    while read < num_steps + 50:
        read += len(next(call).chunk.tokens)
    call.cancel()
    _wait_for(lambda: engine.num_running == 0)


def test_a_client_that_does_not_read_at_all_is_ended(engine, registry, handles):
    with (
        serving(engine, registry, stall_timeout_s=0.5) as worker,
        grpc.insecure_channel(
            worker.target,
            options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)],
        ) as channel,
    ):
        call = _stalled_call(inference_pb2_grpc.InferenceServiceStub(channel))
        _wait_for(lambda: handles.handles[0].is_cancelled, 20.0)
        _wait_for(lambda: engine.num_running == 0, 1.0)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        code, info, _ = _explained(caught.value)
        assert (code, info.reason) == (Code.RESOURCE_EXHAUSTED, "SLOW_READER")


def test_what_a_slow_reader_held_is_free_once_it_is_ended(registry, tmp_path):
    # Other tests' engine keeps what its requests have read.
    num_caches = _num_caches()
    loaded = load_model(save_model(tmp_path / "model"), model_id="tiny")
    request = to_generation_request(_request(stopping=LONG), loaded, request_id="one")
    with Engine(loaded, kv_budget_bytes=1) as poor, pytest.raises(Exhausted) as caught:
        poor.submit(request)
    needed = int(caught.value.metadata["needed"])
    with (
        Engine(loaded, kv_budget_bytes=needed, prefix_cache_bytes=0) as engine,
        serving(engine, registry, stall_timeout_s=1.0) as worker,
        grpc.insecure_channel(
            worker.target,
            options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)],
        ) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = _stalled_call(stub)
        _wait_for(lambda: engine.num_running == 1)
        next_call = stub.Generate(_request(stopping=pb.Stopping(max_tokens=5)))
        assert next(next_call).WhichOneof("event") == "started"
        # All room is taken, so it waits until the client that does not read is ended.
        assert engine.num_waiting == 1
        *_, last = next_call
        assert last.finished.usage.num_completion_tokens == 5
        assert last.finished.timing.queue.ToMilliseconds() > 500
        _wait_for(lambda: engine.num_running == engine.num_waiting == 0)
        _wait_for(lambda: _num_caches() == num_caches)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert _explained(caught.value)[1].reason == "SLOW_READER"


def _num_caches():
    """KV caches with anything in them, of any engine in this process."""
    gc.collect()
    return sum(type(item) is SlotCache and bool(item.keys) for item in gc.get_objects())


def test_one_client_cannot_take_all_places(engine, registry, handles):
    with (
        serving(engine, registry, max_active_per_client=1) as worker,
        grpc.insecure_channel(worker.target) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(_request(stopping=LONG))
        next(call)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(_request()))
        code, info, _ = _explained(caught.value)
        assert (code, info.reason) == (Code.RESOURCE_EXHAUSTED, "CLIENT_LIMIT")
        call.cancel()
        _wait_for(lambda: engine.num_running == 0)
        _answer(stub, _request(stopping=pb.Stopping(max_tokens=1)))


def test_beyond_the_queue_is_refused_with_a_time_to_retry(engine, registry, handles):
    with (
        serving(engine, registry, max_active=2) as worker,
        grpc.insecure_channel(worker.target) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(_request(stopping=LONG)) for _ in range(2)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(_request()))
        code, info, _ = _explained(caught.value)
        assert (code, info.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(caught.value).details[1].Unpack(retry)
        assert retry.retry_delay.ToNanoseconds() > 0
        calls[0].cancel()
        _wait_for(lambda: engine.num_running == 1)
        _answer(stub, _request(stopping=pb.Stopping(max_tokens=1)))
        calls[1].cancel()
        _wait_for(lambda: engine.num_running == 0)
