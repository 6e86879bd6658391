"""The service as a client sees it: descriptors, models, readiness, request ids."""

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service.servicer import SERVICE_NAME, InferenceServicer
from shared.engine.engine import Engine
from shared.errors import Unavailable
from shared.registry.factory import open_registry
from tests.generation import request_of
from tests.worker import CONTEXT_LENGTH, serving


@pytest.fixture(scope="module")
def worker(loaded, tmp_path_factory):
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    with Engine(loaded) as engine, serving(engine, registry) as worker:
        yield worker
    registry.close()


def test_a_client_that_knows_only_the_address_can_generate(worker):
    with grpc.insecure_channel(worker.target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE_NAME).methods_by_name["Generate"]
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        assert request_type is not pb.GenerateRequest
        request = json_format.ParseDict(
            {
                "modelId": "tiny",
                "chat": {"messages": [{"role": "user", "content": "hello"}]},
                "stopping": {"maxTokens": 4, "ignoreEos": True},
                "depth": {"full": {}},
            },
            request_type(),
        )
        call = channel.unary_stream(
            f"/{SERVICE_NAME}/{method.name}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=response_type.FromString,
        )
        events = [json_format.MessageToDict(event) for event in call(request, timeout=30)]
    assert "started" in events[0]
    assert sum(len(event["chunk"]["tokens"]) for event in events[1:-1]) == 4
    assert events[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"


def test_models_are_described(worker, loaded):
    with NeapClient(worker.target) as client:
        (model,) = client.list_models()
        assert model == client.get_model("tiny")
    assert model.fingerprint == loaded.fingerprint
    assert model.architecture == "LlamaForCausalLM"
    assert (model.num_layers, model.context_length) == (4, CONTEXT_LENGTH)
    assert model.vocabulary_size == 263


def test_a_model_says_what_its_engine_does(worker):
    with NeapClient(worker.target) as client:
        assert client.get_model("tiny").load == pb.Load()
        with client.generate(request_of(CONTEXT_LENGTH - 20)) as stream:
            next(stream)
            load = client.get_model("tiny").load
    assert (load.num_running, load.num_waiting) == (1, 0)
    assert 0 < load.kv_usage_ratio <= 1


def test_started_carries_the_callers_request_id_and_the_seed_in_use(worker):
    request = request_of(12, sampling=pb.Sampling(temperature=2.0))
    with grpc.insecure_channel(worker.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        first = list(stub.Generate(request, metadata=(("x-request-id", "mine-1"),)))
        request.sampling.seed = first[0].started.seed
        again = list(stub.Generate(request))
    assert first[0].started.request_id == "mine-1"
    assert again[0].started.request_id != "mine-1"
    assert _ids(first) == _ids(again)
    assert len(_ids(first)) == 12


def _ids(events):
    return [token.id for event in events for token in event.chunk.tokens]


async def test_not_ready_is_unavailable(loaded):
    servicer = InferenceServicer(routers=None)
    servicer.set_loading("tiny, 1 of 2", "reading")
    for call in (
        servicer.GetModel(pb.GetModelRequest(model_id="tiny"), None),
        servicer.ListModels(pb.ListModelsRequest(), None),
    ):
        with pytest.raises(Unavailable) as caught:
            await call
        assert caught.value.reason == "NOT_READY"
        assert caught.value.message.endswith("(reading tiny, 1 of 2)")
