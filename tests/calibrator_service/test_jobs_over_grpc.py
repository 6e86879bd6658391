"""Jobs of a real service process, from their creation to their end, with fake_recipes in place of the calibration."""

import grpc
import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from shared.errors import AlreadyExists
from tests.calibrator_service.conftest import Service, error_of
from tests.waiting import wait_until


def test_job_from_create_to_published(service):
    prompts = ["until-told", "more than fits into a pipe " * 100_000]
    source = pb.SelfGenerated(prompts=prompts)
    job = service.create(self_generated=source, aliases=["stable"], exit_depths=[1], seed=7)
    assert job.calibration_id.startswith("cal-")
    assert list(service.get(job).spec.self_generated.prompts) == prompts, "only Get returns them, before the end"
    seen = []
    for now in service.watch(job):
        seen.append(now)
        if now.phase == pb.PHASE_TRAINING_HEADS:
            (service.folder / "calibrator" / "work" / job.calibration_id / "go").touch()
    end = seen[-1]
    assert end.state == pb.STATE_SUCCEEDED, end.failure
    assert end.fraction == 1.0
    assert end.phase == pb.PHASE_UNSPECIFIED
    assert {"tokens", "loss"} <= end.figures.keys()
    assert end.end_time.ToNanoseconds() > end.create_time.ToNanoseconds()
    assert end.num_resumes == 0
    states = [now.state for now in seen]
    assert states == sorted(states)
    assert pb.PHASE_TRAINING_HEADS in {now.phase for now in seen}
    (published,) = service.versions()
    assert (end.router_version, end.manifest_digest) == (1, published.manifest_digest)
    assert service.aliases() == {"stable": 1}, "latest moves only if the spec names no alias"
    assert service.get(job) == end
    assert list(service.watch(job)) == [end]
    assert end.spec.seed == 7
    assert list(end.spec.exit_depths) == [1]
    wait_until(lambda: not list((service.folder / "calibrator" / "work").iterdir()))


@pytest.mark.full
def test_request_id_names_one_job(service):
    job = service.create()
    assert service.create().calibration_id == job.calibration_id
    error = error_of(lambda: service.create(seed=1))
    assert isinstance(error, AlreadyExists)
    assert error.metadata["calibration_id"] == job.calibration_id
    assert isinstance(error_of(lambda: service.create(aliases=["other"])), AlreadyExists)
    service.end_of(job)
    assert service.create().calibration_id == job.calibration_id
    assert len(service.versions()) == 1
    assert service.aliases() == {"latest": 1}


@pytest.mark.parametrize("behaviour", ["wait", "deaf"])
@pytest.mark.full
def test_cancelling_a_running_job(service, behaviour):
    """ "deaf" never asks whether it should stop, and is killed."""
    job = service.create(behaviour)
    service.wait_for(job, pb.PHASE_COLLECTING)
    request = pb.CancelCalibrationRequest(calibration_id=job.calibration_id)
    assert service.calibrations.CancelCalibration(request).calibration.state == pb.STATE_RUNNING
    assert service.end_of(job).state == pb.STATE_CANCELLED
    log = service.folder / "calibrator" / "logs" / f"{job.calibration_id}.log"
    assert ('"cancelled"' in log.read_text()) == (behaviour == "wait")
    again = service.calibrations.CancelCalibration(request).calibration
    assert again.state == pb.STATE_CANCELLED
    assert service.versions() == []
    wait_until(lambda: not service.job_processes())


@pytest.mark.full
def test_cancelling_a_waiting_job_and_an_ended_one(service):
    first = service.create("wait", "first")
    second = service.create("", "second")
    service.wait_for(first, pb.PHASE_COLLECTING)
    assert service.get(second).state == pb.STATE_QUEUED
    cancel = service.calibrations.CancelCalibration
    now = cancel(pb.CancelCalibrationRequest(calibration_id=second.calibration_id)).calibration
    assert now.state == pb.STATE_CANCELLED
    third = service.create("", "third")
    cancel(pb.CancelCalibrationRequest(calibration_id=first.calibration_id))
    assert service.end_of(third).state == pb.STATE_SUCCEEDED
    now = cancel(pb.CancelCalibrationRequest(calibration_id=third.calibration_id)).calibration
    assert now.state == pb.STATE_SUCCEEDED
    assert len(service.versions()) == 1


def test_killed_service_resumes_its_job(service):
    job = service.create("wait-once")
    waiting = service.create("", "waiting")
    service.wait_for(job, pb.PHASE_COLLECTING)
    assert len(service.job_processes()) == 1
    service.kill()
    wait_until(lambda: not service.job_processes())
    service.start()
    end = service.end_of(job)
    assert end.state == pb.STATE_SUCCEEDED, end.failure
    assert end.num_resumes == 1
    assert end.figures["attempt"] == 2.0, "the working folder was kept"
    assert service.end_of(waiting).num_resumes == 0
    assert len(service.versions()) == 2


@pytest.mark.full
def test_terminated_service_resumes_its_job(service):
    job = service.create("wait-once")
    service.wait_for(job, pb.PHASE_COLLECTING)
    stream = service.calibrations.WatchCalibration(pb.WatchCalibrationRequest(calibration_id=job.calibration_id))
    next(stream)
    assert service.terminate() == 0
    assert not service.job_processes()
    with pytest.raises(grpc.RpcError):
        list(stream)
    service.start()
    end = service.end_of(job)
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 1)


@pytest.mark.full
def test_model_that_is_no_longer_configured(start_service):
    service = start_service("--model", "tiny=/a", "--model", "other=/b")
    job = service.create("wait")
    service.wait_for(job, pb.PHASE_COLLECTING)
    service.kill()
    service.flags = ("--model", "other=/b")
    service.start()
    end = service.end_of(job)
    assert (end.state, end.failure.reason) == (pb.STATE_FAILED, "MODEL_NOT_FOUND")


@pytest.mark.full
def test_second_service_on_the_same_folder_is_refused(service):
    with pytest.raises(AssertionError, match="DATA_DIR_IN_USE"):
        Service(service.folder, "--model", "tiny=/a")
    assert service.end_of(service.create()).state == pb.STATE_SUCCEEDED
