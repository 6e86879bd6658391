"""What the model's generation_config decides over HTTP, and what takes precedence."""

import pytest
from neap_client import NeapClient, generate_request
from neap_client.inference.v1 import inference_pb2 as pb

from shared.model.loaded import wrap_model
from shared.registry.factory import open_registry
from tests.fixed_costs import fixed_cost_engine
from tests.gateways import gateway_to
from tests.worker import build_model, build_tokenizer, serving

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "neap": {"policy": "full"}}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """Its model states that only the most probable token is sampled, and a limit of tokens."""
    model = build_model()
    model.generation_config.update(top_k=1, max_new_tokens=5)
    loaded = wrap_model(model, build_tokenizer(), model_id="tiny")
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    with fixed_cost_engine(loaded) as engine, serving(engine, registry) as worker:
        yield worker
    registry.close()


def answers(gateway, **fields):
    """The texts of five seeds, and the number of tokens of one."""
    bodies = [
        gateway.http.post("/v1/chat/completions", json={**BODY, "seed": seed, **fields}).json() for seed in range(5)
    ]
    [length] = {body["usage"]["completion_tokens"] for body in bodies}
    return {body["choices"][0]["message"]["content"] for body in bodies}, length


def test_the_model_says_what_a_request_leaves_open(worker):
    with gateway_to(worker.target) as gateway:
        greedy, length = answers(gateway, ignore_eos=True)
        assert (len(greedy), length) == (1, 5)
        assert answers(gateway, ignore_eos=True, temperature=0) == (greedy, 5)
        warm, length = answers(gateway, ignore_eos=True, top_k=200, max_tokens=9)
        assert (len(warm), length) == (5, 9)
        [model] = gateway.http.get("/v1/models").json()["data"]
        assert model["neap"]["generation_defaults"] == {"top_k": 1, "max_tokens": 5}


@pytest.mark.full
def test_openais_defaults_hold_where_they_are_asked_for(worker):
    with gateway_to(worker.target, generation_defaults="openai") as gateway:
        warm, length = answers(gateway, ignore_eos=True)
        assert (len(warm), length) == (5, 256)


def test_an_answer_says_over_grpc_what_it_took(worker):
    with NeapClient(worker.target) as client:
        taken = client.answer(generate_request("tiny", "hello", policy="full", model_defaults=True)).started.defaults
        assert taken == pb.GenerationDefaults(sampling=pb.Sampling(temperature=1.0, top_k=1), max_tokens=5)
        assert not client.answer(generate_request("tiny", "hello", policy="full")).started.HasField("defaults")
