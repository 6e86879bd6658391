"""Jobs and routers have pools of threads of their own, so a registry that hangs delays only the calls that need it."""

import grpc
import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.router.v1 import router_pb2

from tests.calibrator_service.conftest import error_of
from tests.registry_servers import shared_url


@pytest.fixture
def service(start_service, own_redis, s3):
    service = start_service("--model", "tiny=/nowhere", "--registry", shared_url(own_redis, s3))
    yield service
    own_redis.resume()
    service.terminate()


def test_jobs_go_on_while_redis_hangs(service, own_redis):
    first = service.create("wait", "one")
    watch = service.calibrations.WatchCalibration(
        pb.WatchCalibrationRequest(calibration_id=first.calibration_id), timeout=60
    )
    next(watch)
    own_redis.hold()
    # Many more than there are threads.
    asked = router_pb2.ListAliasesRequest(model_id="tiny")
    lookups = [service.routers.ListAliases.future(asked, timeout=120) for _ in range(200)]
    streams = [service.routers.Watch(router_pb2.WatchRequest(model_id="tiny")) for _ in range(20)]

    second = service.create("wait", "two")
    assert service.get(second).calibration_id == second.calibration_id
    listed = service.calibrations.ListCalibrations(pb.ListCalibrationsRequest(), timeout=60)
    assert {job.calibration_id for job in listed.calibrations} == {
        first.calibration_id,
        second.calibration_id,
    }
    service.calibrations.CancelCalibration(
        pb.CancelCalibrationRequest(calibration_id=first.calibration_id), timeout=60
    )
    *_, last = watch
    assert last.calibration.state == pb.STATE_CANCELLED

    reasons = {error_of(lookup.result).reason for lookup in lookups}
    assert reasons <= {"REDIS_UNAVAILABLE", "TOO_MANY_CALLS"}
    for stream in streams:
        with pytest.raises(grpc.RpcError):
            next(stream)
    own_redis.resume()
    assert list(service.routers.ListAliases(asked, timeout=60).aliases) == []
