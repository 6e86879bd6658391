"""Jobs and routers have pools of threads of their own, so a registry that hangs delays only the calls that need it."""

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.router.v1 import router_pb2

from shared.blocking import NUM_THREADS
from tests.registry_servers import shared_url

# Calls about routers hang for as long as Redis does.
PATIENT = """
from calibrator_service import __main__
from shared.registry import redis_index
__main__.ROUTER_CALL_WAIT_S = redis_index.REDIS_ANSWER_S = 600.0
"""


@pytest.fixture
def service(start_service, own_redis, s3):
    url = shared_url(own_redis, s3)
    service = start_service("--model", "tiny=/nowhere", "--registry", url, patch=PATIENT)
    yield service
    own_redis.resume()
    service.terminate()


@pytest.mark.full
def test_jobs_go_on_while_redis_hangs(service, own_redis):
    first = service.create("wait", "one")
    watch = service.calibrations.WatchCalibration(
        pb.WatchCalibrationRequest(calibration_id=first.calibration_id), timeout=60
    )
    next(watch)
    own_redis.hold()
    asked = router_pb2.ListAliasesRequest(model_id="tiny")
    lookups = [service.routers.ListAliases.future(asked) for _ in range(2 * NUM_THREADS)]
    streams = [service.routers.Watch(router_pb2.WatchRequest(model_id="tiny")) for _ in range(4)]

    second = service.create("wait", "two")
    assert service.get(second).calibration_id == second.calibration_id
    listed = service.calibrations.ListCalibrations(pb.ListCalibrationsRequest(), timeout=60)
    assert {job.calibration_id for job in listed.calibrations} == {first.calibration_id, second.calibration_id}
    service.calibrations.CancelCalibration(pb.CancelCalibrationRequest(calibration_id=first.calibration_id), timeout=60)
    *_, last = watch
    assert last.calibration.state == pb.STATE_CANCELLED

    assert not any(lookup.done() for lookup in lookups)
    own_redis.resume()
    assert all(not lookup.result(60).aliases for lookup in lookups)
    for stream in streams:
        stream.cancel()
