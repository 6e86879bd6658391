"""A registry that hangs delays only the requests that need it."""

import threading
from contextlib import closing

import grpc
import pytest
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc
from neap_client.status import from_rpc_error

from shared.engine.engine import Engine
from shared.errors import Exhausted
from shared.registry.factory import open_registry
from tests.generation import EXACT, FULL, request_of
from tests.waiting import wait_until
from tests.worker import build_ladder, serving

MAX_WAITING = 24


class Held:
    """A registry that can be made not to answer."""

    def __init__(self, registry) -> None:
        self._registry = registry
        self.go = threading.Event()
        self.go.set()

    def target(self, model_id, alias):
        assert self.go.wait(60)
        return self._registry.target(model_id, alias)

    def get(self, model_id, version):
        assert self.go.wait(60)
        return self._registry.get(model_id, version)

    def read_blob(self, version, name):
        assert self.go.wait(60)
        return self._registry.read_blob(version, name)


@pytest.fixture
def worker(loaded, tmp_path):
    with closing(open_registry(str(tmp_path / "registry"))) as registry:
        manifest = {"model": {"fingerprint": loaded.fingerprint}}
        registry.publish("tiny", manifest, {"x": b""}, request_id="one")
        held = Held(registry)
        options = {"unpack": lambda manifest, blobs, heads: build_ladder(loaded), "max_waiting": MAX_WAITING}
        with Engine(loaded) as engine, serving(engine, held, **options) as worker:
            try:
                yield worker
            finally:
                held.go.set()


def request(depth=EXACT, **router):
    return request_of(3, depth=depth, router=pb.RouterSelector(**router) if router else None)


def test_a_registry_that_hangs_delays_only_requests_that_need_it(worker):
    with grpc.insecure_channel(worker.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        def served(message):
            return list(stub.Generate(message, timeout=50))[-1].HasField("finished")

        assert served(request())
        worker.registry.go.clear()
        lookups = [stub.Generate(request(alias=f"unknown-{number}")) for number in range(MAX_WAITING // 2)]
        lookups += [stub.Generate(request(version=100 + number)) for number in range(MAX_WAITING // 2)]
        wait_until(lambda: worker.store.num_waiting == MAX_WAITING)
        assert served(request(FULL))
        assert served(request(version=1)), "loaded"
        assert served(request()), "by the alias' last answer"
        with pytest.raises(grpc.RpcError) as caught:
            served(request(alias="one-too-many"))
        error = from_rpc_error(caught.value)
        assert (type(error), error.reason) == (Exhausted, "ROUTER_LOOKUPS_BUSY")
        assert error.retry_after_s
        assert not any(call.done() for call in lookups)
        for call in lookups:
            call.cancel()
        wait_until(lambda: worker.store.num_waiting == 0)
