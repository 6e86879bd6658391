"""A rollout as seen by a worker's clients and in its metrics."""

from contextlib import closing
from types import SimpleNamespace

import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.metrics import WorkerMetrics
from inference_service.served_request import with_router
from inference_service.split import takes_canary
from shared.engine.quality.shadow import Shadow
from shared.engine.request.request import GenerationRequest
from shared.errors import PreconditionFailed
from shared.ladder.ladder import ModelIdentity
from shared.ladder.policy import DepthPolicy
from shared.ladder.risk import PublishedRisk, RiskBound
from shared.registry.base import Canary
from shared.registry.factory import open_registry
from tests.fixed_costs import fixed_cost_engine
from tests.generation import request_of
from tests.scripted_ladder import ScriptedLadder
from tests.waiting import wait_until
from tests.worker import serving

RISK = {"loss": "generation_differs", "delta": 0.05, "bounds": [{"threshold": 0.9, "epsilon": 0.05}]}


class Scripted(ScriptedLadder):
    """Always drafts the same token with high probability, so that relaxed answers are wrong."""

    rung_names = ("suffix",)

    def __init__(self, loaded) -> None:
        super().__init__(lambda context: (7, 0.95))
        self.model = ModelIdentity.of(loaded)


@pytest.fixture
def rollout(tmp_path, loaded):
    """A worker on the alias "stable": version 1 with 30 % to version 2, both with a risk table."""
    metrics = WorkerMetrics()
    with closing(open_registry(str(tmp_path / "registry"))) as registry:
        for number in (1, 2):
            manifest = {"number": number, "risk": RISK}
            aliases = ["stable"] if number == 1 else []
            registry.publish("tiny", manifest, {"x": b""}, request_id=str(number), aliases=aliases)
        registry.set_canary("tiny", "stable", Canary(2, 300))
        options = {"unpack": lambda manifest, blobs: Scripted(loaded), "default_alias": "stable", "metrics": metrics}
        with (
            fixed_cost_engine(loaded, shadow_share=1.0) as engine,
            serving(engine, registry, **options) as worker,
            NeapClient(worker.target) as client,
        ):
            yield SimpleNamespace(client=client, engine=engine, metrics=metrics, registry=registry)


def ask(client, policy="exact", request_id=None, version=None):
    """The Started event of one request that is read to its end."""
    relaxed = pb.DepthPolicy(relaxed=pb.Relaxed(threshold=0.9))
    exact = pb.DepthPolicy(exact=pb.Exact(max_drafts=3))
    depth = relaxed if policy == "relaxed" else exact
    router = pb.RouterSelector(version=version) if version else None
    request = request_of(6, text="hello hello", depth=depth, router=router)
    first, *_, last = client.generate(request, request_id=request_id)
    assert last.HasField("finished")
    return first.started


def test_started_names_the_version_that_the_request_id_leads_to(rollout):
    names = [f"r-{number}" for number in range(30)]
    wanted = [1 + takes_canary(name, "tiny", "stable", Canary(2, 300)) for name in names]
    assert set(wanted) == {1, 2}
    wait_until(lambda: ask(rollout.client, request_id=names[wanted.index(2)]).router_version == 2)
    for _ in range(2):
        found = [ask(rollout.client, request_id=name).router_version for name in names]
        assert found == wanted
    read = rollout.metrics.registry.get_sample_value
    for version in ("1", "2"):
        labels = {"model_id": "tiny", "router_version": version}
        assert read("neap_router_requests_total", labels) >= 2 * wanted.count(int(version))
        assert read("neap_router_drafted_tokens_total", {**labels, "rung": "suffix"}) > 0
    rollout.registry.rollback_alias("tiny", "stable")
    assert {ask(rollout.client, request_id=name).router_version for name in names} == {1}


def test_relaxed_is_served_as_exact_once_it_broke_its_bound(rollout):
    assert ask(rollout.client, "relaxed", version=1).policy == "relaxed"
    wait_until(lambda: rollout.engine.shadow.is_idle)
    while not rollout.engine.shadow.is_suspended(1):
        assert ask(rollout.client, "relaxed", version=1).policy == "relaxed"
        wait_until(lambda: rollout.engine.shadow.is_idle)
        assert rollout.engine.shadow.counts[1, 0.05].num_checked < 20
    assert ask(rollout.client, "relaxed", version=1).policy == "exact"
    assert ask(rollout.client, "exact", version=1).policy == "exact"
    assert ask(rollout.client, "relaxed", version=2).policy == "relaxed", "another version"
    read = rollout.metrics.registry.get_sample_value
    labels = {"model_id": "tiny", "router_version": "1"}
    assert read("neap_router_relaxed_suspended", labels) == 1
    assert read("neap_router_relaxed_served_exact_total", labels) == 1
    labels["bound"] = "0.05"
    assert read("neap_router_shadow_disagreement_ratio", labels) == 1
    assert read("neap_router_shadow_disagreement_lower_limit", labels) > 0.05


@pytest.mark.parametrize(
    ("policy", "risk", "default", "bound"),
    [
        (DepthPolicy("relaxed", threshold=0.95), True, 0.5, 0.05),
        (DepthPolicy("relaxed", threshold=0.8), True, 0.5, None),
        (DepthPolicy("relaxed", threshold=0.8), False, 0.5, 0.5),
        (DepthPolicy("relaxed", threshold=0.8), False, None, None),
        (DepthPolicy("exact"), True, 0.5, None),
    ],
)
def test_the_bound_a_request_is_held_to(policy, risk, default, bound):
    published = {"threshold": PublishedRisk(0.05, (RiskBound(0.9, 0.05),))} if risk else {}
    router = SimpleNamespace(version=3, risks=published)
    request = GenerationRequest(prompt_ids=(1,), policy=policy)
    served = with_router(request, router, Shadow(None, None), default)
    assert (served.router_version, served.risk_bound, served.policy) == (3, bound, policy)


MARGIN_RISK = PublishedRisk(0.05, (RiskBound(0.1, 0.05),), num_tokens=128, setting="margin")


@pytest.mark.parametrize(
    ("margin", "published", "default", "bound"),
    [
        (0.1, True, None, (0.05, 128)),
        (0.1, True, 0.5, (0.05, 128)),
        (0.2, True, 0.5, (0.5, None)),  # the operator's
        (0.2, True, None, None),
        (0.01, False, 0.5, (0.5, None)),
        (0.01, False, None, None),
    ],
)
def test_a_margin_without_a_bound_is_refused(margin, published, default, bound):
    """Whatever is certified for thresholds."""
    risks = {"threshold": PublishedRisk(0.05, (RiskBound(0.9, 0.01),))}
    router = SimpleNamespace(version=3, risks=risks | ({"margin": MARGIN_RISK} if published else {}))
    policy = DepthPolicy("relaxed", margin=margin)
    request = GenerationRequest(prompt_ids=(1,), policy=policy)
    if bound is None:
        with pytest.raises(PreconditionFailed) as refused:
            with_router(request, router, Shadow(None, None), default)
        assert refused.value.reason == "MARGIN_NOT_CERTIFIED"
    else:
        served = with_router(request, router, Shadow(None, None), default)
        assert (served.risk_bound, served.risk_bound_tokens, served.policy) == (*bound, policy)
