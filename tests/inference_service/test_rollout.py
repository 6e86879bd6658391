"""A rollout as seen by a worker's clients and in its metrics."""

from contextlib import closing
from types import SimpleNamespace

import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.metrics import WorkerMetrics
from inference_service.resolutions import takes_canary
from shared.ladder.ladder import ModelIdentity
from shared.registry.base import Canary
from shared.registry.factory import open_registry
from tests.fixed_costs import fixed_cost_engine
from tests.generation import request_of
from tests.scripted_ladder import ScriptedLadder
from tests.waiting import wait_until
from tests.worker import serving


class Scripted(ScriptedLadder):
    """Always drafts the same token with high probability."""

    proposer_names = ("prompt-lookup",)

    def __init__(self, loaded) -> None:
        super().__init__(lambda context: (7, 0.95))
        self.model = ModelIdentity.of(loaded)


@pytest.fixture
def rollout(tmp_path, loaded):
    """A worker on the alias "stable": version 1 with 30 % to version 2."""
    metrics = WorkerMetrics()
    with closing(open_registry(str(tmp_path / "registry"))) as registry:
        for number in (1, 2):
            manifest = {"number": number}
            aliases = ["stable"] if number == 1 else []
            registry.publish("tiny", manifest, {"x": b""}, request_id=str(number), aliases=aliases)
        registry.set_canary("tiny", "stable", Canary(2, 300))
        options = {
            "unpack": lambda manifest, blobs, heads: Scripted(loaded),
            "default_alias": "stable",
            "metrics": metrics,
        }
        with (
            fixed_cost_engine(loaded) as engine,
            serving(engine, registry, **options) as worker,
            NeapClient(worker.target) as client,
        ):
            yield SimpleNamespace(client=client, engine=engine, metrics=metrics, registry=registry)


def ask(client, request_id=None):
    """The Started event of one request that is read to its end."""
    request = request_of(6, text="hello hello", depth=pb.DepthPolicy(exact=pb.Exact(max_drafts=3)))
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
        assert read("neap_router_drafted_tokens_total", {**labels, "proposer": "prompt-lookup"}) > 0
    rollout.registry.rollback_alias("tiny", "stable")
    assert {ask(rollout.client, request_id=name).router_version for name in names} == {1}
