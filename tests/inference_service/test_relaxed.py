"""A client that asks for relaxed is told that it is lossy, and how many tokens are not the full model's own choice."""

from contextlib import closing

import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.convert import to_generation_request
from shared.engine.engine import Engine
from shared.errors import PreconditionFailed
from shared.ladder.artefact import pack_ladder
from shared.registry.factory import open_registry
from tests.generation import request_of
from tests.reasons import raises
from tests.worker import build_ladder, serving

EXACT = pb.DepthPolicy(exact=pb.Exact(max_drafts=3))


@pytest.fixture(scope="module")
def client(tmp_path_factory, loaded):
    with closing(open_registry(str(tmp_path_factory.mktemp("registry")))) as registry:
        registry.publish("tiny", *pack_ladder(build_ladder(loaded), {}), request_id="1", aliases=["latest"])
        with Engine(loaded) as engine, serving(engine, registry) as worker, NeapClient(worker.target) as client:
            yield client


def answer(client, depth, **options):
    """(Started, Finished) of one request."""
    stopping = pb.Stopping(max_tokens=16)
    asked = request_of(text="hello hello hello", depth=depth, stopping=stopping, **options)
    first, *_, last = client.generate(asked)
    return first.started, last.finished


def relaxed(**fields):
    return pb.DepthPolicy(relaxed=pb.Relaxed(**fields))


@pytest.mark.parametrize(
    ("depth", "lossy"),
    [
        (pb.DepthPolicy(full=pb.Full()), False),
        (EXACT, False),
        (relaxed(), True),
        (relaxed(threshold=0.9), True),
        (relaxed(margin=0.1), True),
        (relaxed(margin=0.1, threshold=0.9), True),
    ],
)
def test_started_says_what_is_lossy(client, depth, lossy):
    started, finished = answer(client, depth)
    assert (started.policy, started.lossy) == (depth.WhichOneof("policy"), lossy)
    assert finished.depth.num_relaxed == 0 or lossy


def test_a_threshold_holds_for_sampled_and_constrained_answers(client):
    for options in (
        {"sampling": pb.Sampling(temperature=1.0, seed=3)},
        {"sampling": pb.Sampling(repetition_penalty=1.1)},
        {"constraint": pb.Constraint(regex="[0-9]{20}")},
        {"prediction": pb.Prediction(text="hello hello")},
        {"logprobs": 2},
    ):
        started, finished = answer(client, relaxed(threshold=0.9), **options)
        assert started.lossy
        assert finished.usage.num_completion_tokens


def test_relaxed_needs_a_router_and_exact_does_without(loaded):
    with raises(PreconditionFailed, "ROUTER_REQUIRED"):
        to_generation_request(asked(relaxed(margin=0.1)), loaded, request_id="r")
    assert to_generation_request(asked(None), loaded, request_id="r")[0].router_version == 0


def asked(depth: pb.DepthPolicy | None) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), depth=depth)
