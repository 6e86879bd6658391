"""Jobs by two ranks: of the service, which starts them itself, and of torchrun without a service."""

from pathlib import Path

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service.calibration.spec import MAX_RANKS, CalibrationSpec
from calibrator_service.spec_messages import read_stored_spec, stored_spec
from shared.errors import InvalidInput
from tests.calibrator_service.conftest import Service
from tests.reasons import raises

JOB_TIMEOUT_S = 240
PROMPTS = [" ".join(f"w{number + at}" for at in range(2, 8)) for number in range(40)]
SPEC = {
    "max_tokens": 3000,
    "exit_depths": [2],
    "self_generated": pb.SelfGenerated(prompts=PROMPTS, max_new_tokens=24),
    "draft_vocabulary_size": 64,
}


def test_ranks_are_kept_with_a_job_and_bounded():
    spec = CalibrationSpec("tiny", ranks=3)
    assert read_stored_spec(stored_spec(spec), ()) == spec
    for wrong in (0, MAX_RANKS + 1):
        with raises(InvalidInput, "BAD_SPEC", match="ranks"):
            CalibrationSpec("tiny", ranks=wrong)


@pytest.fixture
def service(start_service, model_folder, monkeypatch):
    monkeypatch.setattr("tests.calibrator_service.conftest.WITH_FAKES", WITH_FAKES)
    monkeypatch.setenv("NEAP_RANK_TIMEOUT_S", "20")
    return start_service("--model", f"tiny={model_folder}", "--threads", "2")


WITH_FAKES = (
    "import sys; from calibrator_service import __main__, job_process;"
    "job_process.PROGRAM = ('-m', 'fake_ranks');"
    "sys.exit(__main__.main(sys.argv[1:]))"
)


@pytest.mark.full
def test_a_rank_that_is_killed_in_any_phase_costs_a_retry(service: Service, tmp_path):
    """SIGKILL of either rank, in each phase that it has; the job goes on from what the ranks have kept."""
    stop_in = tmp_path / "stop-in"
    places = ["0 loading", "1 loading", "0 collecting"], ["1 collecting", "0 training_heads", "0 evaluating"]
    for number, phases in enumerate(places):
        stop_in.write_text(phases[0])
        job = service.create(request_id=f"job-{number}", ranks=2, **SPEC)
        texts: list[int] = []
        for following in (*phases[1:], ""):
            rank = service.stopped_job()
            texts.append(num_written(tmp_path))
            if following:
                stop_in.write_text(following)
            rank.kill()
        end = service.end_of(job, JOB_TIMEOUT_S)
        assert end.state == pb.STATE_SUCCEEDED, end.failure
        assert service.record(job)["num_deaths"] == len(phases)
        assert texts == sorted(texts), "no text is lost"
    one, other = service.versions()
    assert [exit_.name for exit_ in one.proposers] == [exit_.name for exit_ in other.proposers]
    wait_until(lambda: not service.job_processes())


def num_written(folder: Path) -> int:
    return len(list(folder.glob("calibrator/work/*/text/*")))


@pytest.mark.full
def test_a_rank_that_hangs_is_waited_for_so_long_and_the_job_resumed(service: Service, tmp_path):
    (tmp_path / "stop-in").write_text("1 collecting")
    job = service.create(ranks=2, **SPEC)
    service.stopped_job()
    end = service.end_of(job, JOB_TIMEOUT_S)
    assert end.state == pb.STATE_SUCCEEDED, end.failure
    assert service.record(job)["num_deaths"] == 1
    wait_until(lambda: not service.job_processes())
    [log] = (tmp_path / "calibrator" / "logs").iterdir()
    assert "Ranks 1 failed to pass monitoredBarrier in 20000 ms" in log.read_text()


def test_a_job_of_ranks_is_cancelled_and_another_reports_and_publishes(service: Service, tmp_path):
    (tmp_path / "stop-in").write_text("1 collecting")
    job = service.create(request_id="cancelled", ranks=2, **SPEC)
    service.stopped_job()
    service.calibrations.CancelCalibration(pb.CancelCalibrationRequest(calibration_id=job.calibration_id))
    assert service.end_of(job, JOB_TIMEOUT_S).state == pb.STATE_CANCELLED
    wait_until(lambda: not service.job_processes())
    seen = list(service.watch(service.create(request_id="whole", ranks=2, **SPEC), JOB_TIMEOUT_S))
    assert seen[-1].state == pb.STATE_SUCCEEDED, seen[-1].failure
    assert seen[-1].spec.ranks == 2
    fractions = [now.fraction for now in seen]
    assert fractions == sorted(fractions)
    assert seen[-1].figures["tokens"] >= 3000
    [version] = service.versions()
    assert version.version == seen[-1].router_version
