"""What one pool has taught reaches no other pool's alias or router."""

from contextlib import closing

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.router.v1 import router_pb2

from calibrator_service.learning.pools import check_aliases, check_parent
from shared.errors import PreconditionFailed
from shared.ladder.blob_names import LADDER_BLOB, STATISTICS_BLOB
from shared.registry.factory import open_registry
from tests.calibrator_service.conftest import error_of
from tests.reasons import raises


def test_a_router_of_a_pool_has_aliases_of_the_pool_alone():
    check_aliases(["latest", "stable", "latest@legal"], "")
    check_aliases(["latest@legal", "stable@legal"], "legal")
    for alias in ("latest", "latest@shop", "legal"):
        with raises(PreconditionFailed, "OTHER_POOL"):
            check_aliases(["latest@legal", alias], "legal")


def test_a_router_goes_on_from_its_pools_or_from_one_of_none():
    for parent, pool in (("", ""), ("", "legal"), ("legal", "legal")):
        check_parent({"pool": parent} if parent else {}, pool)
    for parent, pool in (("legal", ""), ("legal", "shop")):
        with raises(PreconditionFailed, "OTHER_POOL"):
            check_parent({"pool": parent}, pool)


@pytest.fixture
def published(service):
    """Version 1 of no pool, version 2 of the pool legal."""
    with closing(open_registry(f"file://{service.folder}/registry")) as registry:
        for number, manifest in enumerate(({}, {"pool": "legal"})):
            blobs = {LADDER_BLOB: b"ladder", STATISTICS_BLOB: b"sums"}
            registry.publish("tiny", manifest, blobs, request_id=str(number), aliases=())
    return service


def test_no_alias_of_others_is_set_to_it(published):
    routers = published.routers
    routers.SetAlias(router_pb2.SetAliasRequest(model_id="tiny", alias="latest", version=1))
    canary = router_pb2.Canary(version=2, share_per_mille=10)
    request = router_pb2.SetCanaryRequest(model_id="tiny", alias="latest", canary=canary)
    assert error_of(lambda: routers.SetCanary(request)).reason == "OTHER_POOL"
    change = routers.SetAlias(router_pb2.SetAliasRequest(model_id="tiny", alias="latest@legal", version=2)).change
    assert (change.alias, change.to_version) == ("latest@legal", 2)


def test_no_job_carries_it_to_others(published):
    """By an alias, to another pool's or to the model's own as their parent."""
    for spec in (
        pb.CalibrationSpec(served_traffic=pb.ServedTraffic(pool="legal"), aliases=["latest"]),
        pb.CalibrationSpec(served_traffic=pb.ServedTraffic(pool="shop"), parent=pb.ParentRouter(version=2)),
        pb.CalibrationSpec(self_generated=pb.SelfGenerated(), parent=pb.ParentRouter(version=2)),
    ):
        spec.model_id = "tiny"
        request = pb.CreateCalibrationRequest(request_id="a", spec=spec)
        error = error_of(lambda request=request: published.calibrations.CreateCalibration(request))
        assert error.reason == "OTHER_POOL", spec


def test_a_job_of_a_pool_moves_the_pools_alias(published):
    spec = pb.CalibrationSpec(
        model_id="tiny", served_traffic=pb.ServedTraffic(pool="legal"), parent=pb.ParentRouter(version=2)
    )
    job = published.calibrations.CreateCalibration(pb.CreateCalibrationRequest(request_id="a", spec=spec)).calibration
    assert list(job.spec.aliases) == ["latest@legal"]
    assert job.spec.served_traffic.pool == "legal"
