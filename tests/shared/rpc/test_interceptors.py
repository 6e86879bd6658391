import asyncio
import gc
import time
import urllib.parse
import weakref
from contextlib import closing

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc
from structlog.testing import capture_logs

from shared.errors import Corrupt, InvalidInput, NotFound
from shared.rpc import interceptors
from shared.rpc.interceptors import ServiceInterceptor, current_request_id
from tests.shared.rpc.conftest import Scripted, begun_call, running
from tests.waiting import wait_until
from tests.zero_window import ZeroWindow


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(server.target) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def _info(error):
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


def _raising(error):
    def handle(request, context):
        raise error

    return handle


def test_streaming_errors_come_after_what_was_sent(scripted, stub):
    async def handle(request, context):
        yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text="a"))
        raise Corrupt("broken")

    scripted.on_generate = handle
    call = stub.Generate(inference_pb2.GenerateRequest())
    assert next(call).chunk.text == "a"
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert _info(caught.value).reason == "CORRUPT"


@pytest.mark.parametrize("streaming", [False, True])
def test_unexpected_errors_show_an_id_and_not_their_text(scripted, stub, streaming):
    async def generate(request, context):
        raise RuntimeError("secret path /etc/x")
        yield

    scripted.on_get_model = _raising(RuntimeError("secret path /etc/x"))
    scripted.on_generate = generate

    def call():
        if streaming:
            list(stub.Generate(inference_pb2.GenerateRequest()))
        else:
            stub.GetModel(inference_pb2.GetModelRequest())

    with capture_logs() as logs, pytest.raises(grpc.RpcError) as caught:
        call()
    error = caught.value
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert all(b"secret" not in _as_bytes(value) for _, value in error.trailing_metadata())
    error_id = _info(error).metadata["error_id"]
    logged = [entry for entry in logs if entry["event"] == "unexpected error"]
    assert [entry["error_id"] for entry in logged] == [error_id]
    assert logged[0]["exc_info"]


def _as_bytes(value):
    return value if isinstance(value, bytes) else value.encode()


@pytest.mark.parametrize("error", [InvalidInput("no"), RuntimeError("a fault")])
def test_what_a_failed_call_held_goes_with_it(scripted, stub, error):
    """Without a collection: its frames know the error, and the error knows them."""

    class Held:
        pass

    held = weakref.WeakSet()

    def handle(request, context):
        large = Held()
        held.add(large)
        try:
            raise error
        except Exception as found:
            known = found
            raise known from None

    scripted.on_get_model = handle
    gc.disable()
    try:
        with pytest.raises(grpc.RpcError):
            stub.GetModel(inference_pb2.GetModelRequest())
        wait_until(lambda: not held)
    finally:
        gc.enable()


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unparsable_message_is_invalid_input(scripted, server, streaming):
    method = f"/neap.inference.v1.InferenceService/{'Generate' if streaming else 'GetModel'}"
    with grpc.insecure_channel(server.target) as channel:
        if streaming:
            call = list
            reply = channel.unary_stream(method)(b"\x0a\x02\xff\xfe")
        else:
            call = channel.unary_unary(method)
            reply = b"\x0a\x02\xff\xfe"  # field 1, a string that is not UTF-8
        with pytest.raises(grpc.RpcError) as caught:
            call(reply)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert _info(caught.value).reason == "MALFORMED_REQUEST"
    assert scripted.num_calls == 0


def test_request_ids_are_taken_made_and_returned(scripted, stub):
    seen = []
    scripted.on_get_model = lambda request, context: seen.append(current_request_id())
    _, call = stub.GetModel.with_call(inference_pb2.GetModelRequest(), metadata=(("x-request-id", "abc-1"),))
    assert ("x-request-id", "abc-1") in [tuple(item) for item in call.trailing_metadata()]
    stub.GetModel(inference_pb2.GetModelRequest())
    stub.GetModel(inference_pb2.GetModelRequest(), metadata=(("x-request-id", "b ad\x21" * 99),))
    assert seen[0] == "abc-1"
    assert len({*seen}) == 3
    assert len(seen[1]) == len(seen[2]) == 16


def test_one_log_line_per_call_with_code_and_duration(scripted, stub):
    scripted.on_get_model = lambda request, context: asyncio.sleep(0.05)
    with capture_logs() as logs:
        started_s = time.monotonic()
        stub.GetModel(inference_pb2.GetModelRequest())
        elapsed_s = time.monotonic() - started_s
        scripted.on_get_model = _raising(NotFound("x"))
        with pytest.raises(grpc.RpcError):
            stub.GetModel(inference_pb2.GetModelRequest())
        wait_until(lambda: len(logs) == 2)
    assert [entry["code"] for entry in logs] == ["OK", "NOT_FOUND"]
    assert logs[0]["method"] == "/neap.inference.v1.InferenceService/GetModel"
    assert 0.05 <= logs[0]["duration_s"] <= elapsed_s
    assert logs[1]["reason"] == "NOT_FOUND"


@pytest.mark.parametrize("code", ["DEADLINE_EXCEEDED", "CANCELLED"])
def test_deadline_and_cancel_are_told_apart_in_the_log(scripted, stub, code):
    ended = []

    async def handle(request, context):
        try:
            yield inference_pb2.GenerateResponse()
            await asyncio.sleep(300)
        finally:
            ended.append(True)

    scripted.on_generate = handle
    with capture_logs() as logs:
        call = begun_call(stub, with_deadline=code == "DEADLINE_EXCEEDED")
        if code == "CANCELLED":
            call.cancel()
        wait_until(lambda: ended and logs)
    assert logs[-1]["code"] == code


def test_a_write_that_fails_because_the_client_is_gone_is_not_an_error(scripted, stub):
    async def handle(request, context):
        yield inference_pb2.GenerateResponse()
        raise grpc.aio.InternalError('Failed "execute_batch"')  # as `context.write` may, before it is cancelled

    scripted.on_generate = handle
    with capture_logs() as logs:
        call = stub.Generate(inference_pb2.GenerateRequest())
        next(call)
        wait_until(lambda: logs)
    assert [(entry["event"], entry["code"]) for entry in logs] == [("call ended", "CANCELLED")]


async def test_a_call_that_ends_while_its_first_response_is_written_is_told_why():
    interceptor, scripted = ServiceInterceptor(), Scripted()

    async def generate(request, context):
        # Runs when the write has begun, and before anything that gRPC reports.
        asyncio.get_running_loop().call_soon(interceptor.calls.end)
        yield inference_pb2.GenerateResponse()

    scripted.on_generate = generate
    server = grpc.aio.server(interceptors=(interceptor,))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="is stopping") as caught:
                async for _ in call:
                    pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(None)


@pytest.mark.parametrize("character", ["a", "%", "é", "語", "😀", "\x01"])
def test_an_error_with_long_texts_arrives_whatever_its_characters(scripted, stub, character):
    text = character * 20_000
    metadata = {"field": text, **{f"key_{number}": text for number in range(20)}}
    scripted.on_get_model = _raising(InvalidInput(text, reason="BAD_SPEC", metadata=metadata))
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetModel(inference_pb2.GetModelRequest(), metadata=(("x-request-id", "r" * 128),))
    error = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(character * 100)
    assert _info(error).reason == "BAD_SPEC"
    # As HTTP/2 carries them: the text percent-encoded, the details in base64, 32 bytes for each header.
    sizes = [len(key) + 32 + _encoded_bytes(key, value) for key, value in error.trailing_metadata()]
    sizes.append(len(urllib.parse.quote(error.details(), safe="")) + len("grpc-message") + 32)
    assert sum(sizes) < 8192


def _encoded_bytes(key, value):
    return -(-len(_as_bytes(value)) * 4 // 3) if key.endswith("-bin") else len(_as_bytes(value))


def test_answers_that_are_not_read_count_until_they_are(scripted, monkeypatch):
    """A client has half of what there is, and what it reads is given back."""
    answer = inference_pb2.GetModelResponse(model=inference_pb2.Model(model_id="m" * 100_000))
    scripted.on_get_model = lambda request, context: answer
    each = interceptors.UNREAD_CALL_BYTES + interceptors.UNREAD_FACTOR * answer.ByteSize()
    monkeypatch.setattr(interceptors, "UNREAD_BYTES", 5 * each)
    with (
        running(scripted) as server,
        closing(ZeroWindow(server.target)) as deaf,
        grpc.insecure_channel(server.target) as channel,
    ):
        ask = inference_pb2_grpc.InferenceServiceStub(channel).GetModel
        for _ in range(5):
            assert ask(inference_pb2.GetModelRequest(), timeout=60) == answer
        for _ in range(3):
            deaf.call("/neap.inference.v1.InferenceService/GetModel", b"")

        def reason():
            try:
                ask(inference_pb2.GetModelRequest(), timeout=60)
            except grpc.RpcError as error:
                return _info(error).reason
            return ""

        wait_until(lambda: reason() == "CLIENT_LIMIT")  # once all three wait to be read
        deaf.close()
        wait_until(lambda: not len(server.server._calls))
        assert ask(inference_pb2.GetModelRequest(), timeout=60) == answer
