"""Jobs and queues that fail, in a real service process with real job processes."""

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from neap_client.calibration.v1 import calibration_pb2 as pb

from tests.calibrator_service.conftest import Service
from tests.waiting import wait_until

FAILURES = {
    "no-model": ("MODEL_NOT_FOUND", "/nowhere"),
    "unsupported": ("UNSUPPORTED_MODEL", "decoder layers"),
    "no-dataset": ("DATASET_NOT_FOUND", "nobody/nothing"),
    "full-work-dir": ("DISK_FULL", "space"),
    "bug": ("INTERNAL", "internal error"),
}


def test_failures_say_why_and_publish_nothing_and_the_queue_goes_on(service):
    for behaviour, (reason, said) in FAILURES.items():
        end = service.end_of(service.create(behaviour, behaviour))
        assert (end.state, end.failure.reason) == (pb.STATE_FAILED, reason)
        assert said in end.failure.message
        assert "secret" not in end.failure.message
    log = service.folder / "calibrator" / "logs" / f"{end.calibration_id}.log"
    assert "secret detail" in log.read_text(), "of the last one, a bug"
    assert service.versions() == []
    assert _registry_files(service) == []
    assert service.end_of(service.create(request_id="next")).state == pb.STATE_SUCCEEDED


@pytest.mark.full
def test_process_that_always_dies_fails_after_three_resumes(service):
    end = service.end_of(service.create("die"))
    assert end.state == pb.STATE_FAILED
    assert end.failure.reason == "JOB_PROCESS_DIED"
    assert "4 times" in end.failure.message
    assert "SIGKILL" in end.failure.message
    assert end.num_resumes == 3


def _registry_files(service: Service) -> list[Path]:
    registry = service.folder / "registry"
    found = (path for kind in ("blobs", "staging") for path in (registry / kind).rglob("*"))
    return [path for path in found if path.is_file()]


# fsync of every file in the registry's folder raises ENOSPC as long as the file "full" is there.
FULL_REGISTRY = """
import errno, os
from pathlib import Path
real = os.fsync
def fsync(descriptor):
    path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    if "/registry/" in path and Path(path.partition("/registry/")[0], "full").exists():
        raise OSError(errno.ENOSPC, "No space left on device")
    real(descriptor)
os.fsync = fsync
import calibrator_service.publisher as p
p.LONGEST_PAUSE_S = 0.1
"""


@pytest.mark.full
def test_a_registry_without_room_is_waited_for_and_the_queue_goes_on(start_service):
    service = start_service(patch=FULL_REGISTRY)
    (service.folder / "full").touch()
    job, other = service.create(), service.create("no-model", "other")
    states = service.watch(job)
    waiting = next(now for now in states if now.failure.reason)
    assert (waiting.state, waiting.phase) == (pb.STATE_RUNNING, pb.PHASE_PUBLISHING)
    assert waiting.failure.reason == "DISK_FULL"
    assert service.end_of(other).failure.reason == "MODEL_NOT_FOUND"
    assert service.versions() == []
    wait_until(lambda: not _registry_files(service))
    (service.folder / "full").unlink()
    *_, end = states
    assert end.state == pb.STATE_SUCCEEDED, end
    assert not end.HasField("failure")
    assert len(service.versions()) == 1


@pytest.mark.full
def test_a_product_waits_for_room_to_be_saved(service):
    job = service.create("no-room-for-product")
    states = service.watch(job)
    waiting = next(now for now in states if now.failure.reason)
    assert (waiting.state, waiting.failure.reason) == (pb.STATE_RUNNING, "DISK_FULL")
    (service.folder / "calibrator" / "work" / job.calibration_id / "room").touch()
    *_, end = states
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 0), end
    assert not end.HasField("failure")


@pytest.mark.full
def test_a_product_that_cannot_be_published_waits_visibly_until_it_is_retried(start_service):
    service = start_service(
        patch="from shared.errors import PreconditionFailed\n"
        "import calibrator_service.publisher as p\n"
        "def refuse(*_):\n"
        "    p.publish = real\n"
        "    raise PreconditionFailed('a newer neap', reason='SCHEMA_TOO_NEW')\n"
        "real, p.publish = p.publish, refuse\n"
    )
    job = service.create()
    waiting = next(now for now in service.watch(job) if now.state == pb.STATE_WAITING)
    assert (waiting.failure.reason, waiting.failure.message) == ("SCHEMA_TOO_NEW", "a newer neap")
    retry = service.calibrations.RetryCalibration
    asked = pb.RetryCalibrationRequest(calibration_id=job.calibration_id)
    assert retry(asked, timeout=60).calibration.state == pb.STATE_RUNNING
    assert service.end_of(job).state == pb.STATE_SUCCEEDED


@pytest.mark.full
def test_a_service_killed_right_after_publishing_publishes_once(start_service):
    service = start_service(
        patch="import os\n"
        "from calibrator_service.jobs import JobStore\n"
        "JobStore.end_publishing = lambda *_, **__: os.kill(os.getpid(), 9)\n"
    )
    job = service.create()
    service.process.wait(60)
    service.kill()
    service.patch = ""
    service.start()
    end = service.end_of(job)
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 0)
    (published,) = service.versions()
    assert end.manifest_digest == published.manifest_digest


@pytest.mark.full
def test_a_product_whose_end_cannot_be_recorded_is_recorded_later(start_service):
    service = start_service(
        patch="import calibrator_service.service_thread as s; s.RETRY_INTERVAL_S = 0.1\n"
        "from calibrator_service.jobs import JobStore\n"
        "from shared.errors import Exhausted\n"
        "def full(*_):\n"
        "    JobStore.record_end = real\n"
        "    raise Exhausted('no space left for jobs.db', reason='DISK_FULL')\n"
        "real, JobStore.record_end = JobStore.record_end, full\n"
    )
    end = service.end_of(service.create())
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 1), end.failure
    (published,) = service.versions()
    assert end.manifest_digest == published.manifest_digest


@pytest.mark.full
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


@pytest.mark.full
def test_a_job_that_cannot_be_supervised_fails_and_the_queue_continues(start_service):
    service = start_service(
        patch="import subprocess as s\nreal, s.Popen = s.Popen, lambda *_, **__: (setattr(s, 'Popen', real), 1 / 0)"
    )
    end = service.end_of(service.create())
    assert (end.state, end.failure.reason) == (pb.STATE_FAILED, "INTERNAL")
    assert "division" not in end.failure.message
    assert service.end_of(service.create(request_id="next")).state == pb.STATE_SUCCEEDED
