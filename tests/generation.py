"""Generate calls of tests, and what their answers say."""

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from neap_client.inference.v1 import inference_pb2 as pb

from shared.ladder.artefact import pack_ladder
from tests.worker import build_ladder

FULL = pb.DepthPolicy(full=pb.Full())


def publish(registry, engine, **identity):
    manifest, blobs = pack_ladder(build_ladder(engine.loaded, **identity), {})
    return registry.publish("tiny", manifest, blobs, request_id="one")


EXACT = pb.DepthPolicy(exact=pb.Exact())


def request_of(max_tokens=None, **changes):
    """A request of policy full unless `changes` says otherwise.
    It gets exactly `max_tokens` tokens if that is given."""
    fields = {"model_id": "tiny", "text": "hello", "depth": FULL, **changes}
    if max_tokens is not None:
        fields["stopping"] = pb.Stopping(max_tokens=max_tokens, ignore_eos=True)
    if "token_ids" in changes or "chat" in changes:
        del fields["text"]
    return pb.GenerateRequest(**fields)


def refused(stub, request, **call):
    """(code, ErrorInfo, message) of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=call.pop("timeout", 30), **call))
    return explained(caught.value)


def explained(error):
    status = rpc_status.from_call(error)
    assert status is not None, f"no rich error: {error}"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "neap"
    assert status.code == error.code().value[0]
    return error.code(), info, status.message


def answer(stub, request, **call):
    """(Started, tokens, chunk texts, Finished) of a call that must succeed."""
    first, *middle, last = stub.Generate(request, timeout=60, **call)
    assert first.WhichOneof("event") == "started"
    assert last.WhichOneof("event") == "finished"
    chunks = [event.chunk for event in middle]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return first.started, tokens, [chunk.text for chunk in chunks], last.finished
