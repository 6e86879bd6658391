import openai
import pytest

from shared.model.loaded import wrap_model
from shared.registry.factory import open_registry
from tests.fixed_costs import fixed_cost_engine
from tests.gateways import finished, gateway_to, scripted_worker, started
from tests.generation import publish
from tests.worker import build_model, build_tokenizer, serving


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A real worker with a tiny model and a router."""
    loaded = wrap_model(build_model(), build_tokenizer(), model_id="tiny")
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    with fixed_cost_engine(loaded) as engine:
        publish(registry, engine)
        with serving(engine, registry) as worker:
            yield worker
    registry.close()


@pytest.fixture(scope="module")
def gateway(worker):
    with gateway_to(worker.target) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted():
    """A worker whose script a test sets, and a gateway to it."""
    with (
        scripted_worker(lambda request: [started(), finished()]) as state,
        gateway_to(state.target, stall_timeout_s=0.5) as gateway,
    ):
        yield state.worker, gateway
