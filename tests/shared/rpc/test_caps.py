"""Limits on messages and metadata. A call beyond a limit is refused, and the service goes on."""

import grpc
import pytest
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc

from shared.rpc.serving import MAX_MESSAGE_BYTES


@pytest.fixture
def stub(server):
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.target, options=options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def _refused(call, request, **options):
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=60, **options)
    return caught.value.code()


def test_a_message_is_limited_by_its_decompressed_size(scripted, stub):
    bomb = inference_pb2.GetModelRequest(model_id="x" * 2 * MAX_MESSAGE_BYTES)
    refused = _refused(stub.GetModel, bomb, compression=grpc.Compression.Gzip)
    assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
    stub.GetModel(inference_pb2.GetModelRequest(), timeout=60)
    assert scripted.num_calls == 1


def test_too_much_metadata_is_refused(scripted, stub):
    request = inference_pb2.GetModelRequest()
    endless = (("x-request-id", "x" * 100_000),)
    refused = _refused(stub.GetModel, request, metadata=endless)
    assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
    many = tuple((f"x-{number}", "y" * 100) for number in range(1000))
    refused = _refused(stub.GetModel, request, metadata=many)
    assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
    stub.GetModel(request, timeout=60)
    assert scripted.num_calls == 1
