"""One worker with a tiny model, in this process, behind real gRPC on loopback."""

import grpc
import pytest
from neap_client.inference.v1 import inference_pb2_grpc

from shared.engine.engine import Engine
from shared.model.load import load_model
from shared.registry.factory import open_registry
from tests.worker import save_model, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model "tiny" on disk."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
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
    options = [("grpc.max_send_message_length", -1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
    with grpc.insecure_channel(worker.target, options=options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)
