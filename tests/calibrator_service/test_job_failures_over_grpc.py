"""Jobs and queues that fail, in a real service process with real job processes."""

from collections.abc import Callable

import pytest
from grpc_health.v1 import health_pb2
from neap_client.calibration.v1 import calibration_pb2 as pb

from tests.calibrator_service.conftest import Service
from tests.waiting import wait_until

StartService = Callable[..., Service]


@pytest.mark.parametrize(
    ("behaviour", "reason", "said"),
    [
        ("no-model", "MODEL_NOT_FOUND", "/nowhere"),
        ("unsupported", "UNSUPPORTED_MODEL", "decoder layers"),
        ("no-dataset", "DATASET_NOT_FOUND", "nobody/nothing"),
        ("full-work-dir", "DISK_FULL", "space"),
        ("full-registry", "DISK_FULL", "nothing was published"),
        ("bug", "INTERNAL", "internal error"),
    ],
)
def test_failures_say_why_and_publish_nothing(service, behaviour, reason, said):
    """full-registry: fsync of every file in the registry's folder raises ENOSPC in the job's process."""
    end = service.end_of(service.create(behaviour))
    assert end.state == pb.STATE_FAILED
    assert end.failure.reason == reason
    assert said in end.failure.message
    assert "secret" not in end.failure.message
    assert service.versions() == []
    registry = service.folder / "registry"
    left = [
        path
        for kind in ("blobs", "staging")
        for path in (registry / kind).rglob("*")
        if path.is_file()
    ]
    assert left == []
    if behaviour == "bug":
        log = service.folder / "calibrator" / "logs" / f"{end.calibration_id}.log"
        assert "secret detail" in log.read_text()
    # The queue goes on.
    assert service.end_of(service.create(request_id="next")).state == pb.STATE_SUCCEEDED


@pytest.mark.full
def test_process_that_always_dies_fails_after_three_resumes(service):
    end = service.end_of(service.create("die"))
    assert end.state == pb.STATE_FAILED
    assert end.failure.reason == "JOB_PROCESS_DIED"
    assert "4 times" in end.failure.message
    assert "SIGKILL" in end.failure.message
    assert end.num_resumes == 3


@pytest.mark.full
def test_death_right_after_publishing_publishes_once(service):
    end = service.end_of(service.create("die-publishing"))
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 1)
    (published,) = service.versions()
    assert end.manifest_digest == published.manifest_digest
    # 1: the finished product of the first process was published, not a second one.
    assert '"attempt":1' in service.version(1).manifest_json


@pytest.mark.full
def test_a_publication_that_cannot_be_recorded_is_recorded_later(start_service):
    service = start_service(
        patch="import calibrator_service.supervisor as s; s.RETRY_INTERVAL_S = 0.1"
    )
    end = service.end_of(service.create("unrecorded-once"))
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 1), end.failure
    (published,) = service.versions()
    assert end.manifest_digest == published.manifest_digest


def test_a_service_whose_queue_has_died_reports_not_serving(start_service):
    service = start_service(
        *("--model", "tiny=/a", "--grace-s", "60"),
        patch="from calibrator_service.jobs import JobStore as S\n"
        "real, S.claim = S.claim, lambda store: real(store) and 1 / 0",
    )
    wait_until(lambda: service.health() == health_pb2.HealthCheckResponse.SERVING)
    job = service.create()
    wait_until(lambda: service.health() == health_pb2.HealthCheckResponse.NOT_SERVING)
    assert service.terminate() == 1
    service.patch, service.flags = "", ("--model", "tiny=/a")
    service.start()
    assert service.end_of(job).state == pb.STATE_SUCCEEDED


def test_a_job_that_cannot_be_supervised_fails_and_the_queue_continues(start_service):
    service = start_service(
        patch="import subprocess as s\n"
        "real, s.Popen = s.Popen, lambda *_, **__: (setattr(s, 'Popen', real), 1 / 0)"
    )
    end = service.end_of(service.create())
    assert (end.state, end.failure.reason) == (pb.STATE_FAILED, "INTERNAL")
    assert "division" not in end.failure.message
    assert service.end_of(service.create(request_id="next")).state == pb.STATE_SUCCEEDED
