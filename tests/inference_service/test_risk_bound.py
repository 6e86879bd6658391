"""A certified bound, from the published manifest to the client that asks for relaxed."""

from contextlib import closing

import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from shared.engine.engine import Engine
from shared.errors import InvalidInput, PreconditionFailed
from shared.ladder.artefact import pack_ladder
from shared.registry.factory import open_registry
from tests.generation import request_of
from tests.worker import build_ladder, serving

RISK = {
    "loss": "generation_differs",
    "delta": 0.05,
    "num_prompts": 400,
    "max_new_tokens": 128,
    "bounds": [{"threshold": 0.99, "epsilon": 0.05}, {"threshold": 0.9, "epsilon": 0.2}],
    "engine": {"dtype": "float32", "device": "cpu"},
}


MARGIN_BOUNDS = [{"margin": 0.1, "epsilon": 0.3}]


@pytest.fixture(scope="module")
def client(tmp_path_factory, loaded):
    """Of a worker whose router, version 1, publishes RISK and MARGIN_BOUNDS; version 2 publishes none, versions 3 and 4
    those of other engines."""
    registry_folder = tmp_path_factory.mktemp("registry")
    with closing(open_registry(str(registry_folder))) as registry:
        narrow = {**RISK, "engine": {"dtype": "bfloat16", "device": "cpu"}}
        on_gpu = {**RISK, "engine": {"dtype": "float32", "device": "cuda"}}
        for number, risk in enumerate((RISK, {"bounds": []}, narrow, on_gpu), 1):
            margin_risk = {**risk, "bounds": risk["bounds"] and MARGIN_BOUNDS}
            report = {"risk": risk, "margin_risk": margin_risk}
            manifest, blobs = pack_ladder(build_ladder(loaded), report)
            registry.publish("tiny", manifest, blobs, request_id=str(number), aliases=["latest"])
        with Engine(loaded) as engine, serving(engine, registry) as worker, NeapClient(worker.target) as client:
            yield client


def started(client, depth: pb.DepthPolicy, version: int = 1, **sampling: float) -> pb.Started:
    router = pb.RouterSelector(version=version)
    request = request_of(2, depth=depth, sampling=pb.Sampling(**sampling), router=router)
    first, *_ = client.generate(request)
    return first.started


def relaxed(threshold: float | None = None) -> pb.DepthPolicy:
    return pb.DepthPolicy(relaxed=pb.Relaxed(threshold=threshold))


def within(margin: float) -> pb.DepthPolicy:
    return pb.DepthPolicy(relaxed=pb.Relaxed(margin=margin))


def test_the_bound_of_the_requests_margin(client) -> None:
    said = started(client, within(0.05))
    assert (said.policy, said.risk_bound, said.risk_bound_tokens) == ("relaxed", 0.3, 128)


@pytest.mark.parametrize(
    ("margin", "version", "sampling", "error", "reason"),
    [
        (0.2, 1, {}, PreconditionFailed, "MARGIN_NOT_CERTIFIED"),
        (0.05, 2, {}, PreconditionFailed, "MARGIN_NOT_CERTIFIED"),
        (0.05, 3, {}, PreconditionFailed, "MARGIN_NOT_CERTIFIED"),
        (0.05, 4, {}, PreconditionFailed, "MARGIN_NOT_CERTIFIED"),
        (0.05, 1, {"temperature": 1.0}, InvalidInput, "MARGIN_NEEDS_GREEDY"),
    ],
)
def test_a_margin_is_refused_where_none_is_certified(client, margin, version, sampling, error, reason) -> None:
    with pytest.raises(error) as refused:
        started(client, within(margin), version, **sampling)
    assert refused.value.reason == reason


@pytest.mark.parametrize(("threshold", "bound"), [(0.995, 0.05), (0.99, 0.05), (0.95, 0.2)])
def test_the_bound_of_the_requests_threshold(client, threshold: float, bound: float) -> None:
    said = started(client, relaxed(threshold))
    assert (said.policy, said.risk_bound, said.risk_bound_tokens) == ("relaxed", bound, 128)


def test_no_bound_for_a_constrained_answer(client) -> None:
    constraint = pb.Constraint(regex="[0-9]+")
    router = pb.RouterSelector(version=1)
    asked = request_of(depth=relaxed(0.99), constraint=constraint, router=router)
    said, *_ = client.generate(asked)
    assert said.started.policy == "relaxed"
    assert not said.started.HasField("risk_bound")


@pytest.mark.parametrize(
    ("depth", "version", "sampling"),
    [
        (relaxed(0.8), 1, {}),  # bolder than what is certified, and served all the same
        (relaxed(), 1, {}),
        (relaxed(0.99), 2, {}),
        (relaxed(0.99), 3, {}),  # certified with keys and values of another dtype
        (relaxed(0.99), 4, {}),  # certified on another device
        (relaxed(0.99), 1, {"temperature": 1.0}),
        (relaxed(0.99), 1, {"repetition_penalty": 1.1}),
        (pb.DepthPolicy(exact=pb.Exact()), 1, {}),
        (pb.DepthPolicy(full=pb.Full()), 1, {}),
    ],
)
def test_no_bound_where_none_is_certified(client, depth, version, sampling) -> None:
    said = started(client, depth, version, **sampling)
    assert said.policy == depth.WhichOneof("policy")
    assert not said.HasField("risk_bound")
    assert not said.HasField("risk_bound_tokens")
