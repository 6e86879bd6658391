"""Jobs by two ranks: of the service, which starts them itself, and of torchrun without a service."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service import rank
from calibrator_service.calibration.ranks import Ranks
from calibrator_service.calibration.spec import CalibrationSpec
from calibrator_service.spec_messages import read_spec, stored_spec
from shared.calibrator_settings import CalibratorSettings
from shared.errors import InvalidInput, PreconditionFailed
from shared.registry.factory import open_registry
from tests.calibrator_service.conftest import REPOSITORY, Service
from tests.reasons import raises
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)

JOB_TIMEOUT_S = 400
PROMPTS = [" ".join(f"w{number + at}" for at in range(2, 8)) for number in range(40)]
SPEC = {
    "max_tokens": 3000,
    "exit_depths": [2],
    "self_generated": pb.SelfGenerated(prompts=PROMPTS, max_new_tokens=24),
    "draft_vocabulary_size": 64,
}


def test_ranks_are_kept_with_a_job_and_bounded():
    message = pb.CalibrationSpec(model_id="tiny", self_generated=pb.SelfGenerated(), ranks=3)
    assert read_spec(b"".join(stored_spec(message)), "cal-1") == (message, CalibrationSpec("tiny", ranks=3))
    for wrong in (0, 65):
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


# Rank 1 is lost while it collects where it hangs.
@pytest.mark.full
@pytest.mark.parametrize("place", ["1 loading", "0 collecting", "0 training_heads"])
def test_a_rank_that_is_killed_costs_a_retry_and_no_text(service: Service, tmp_path, place):
    """SIGKILL of either rank, while both work, and once the other has done its part."""
    (tmp_path / "stop-in").write_text(place)
    job = service.create(ranks=2, **SPEC)
    rank = service.stopped_job()
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("calibrator/work/*/text/*")}
    seen: list[bool] = []
    rank.kill()
    for now in service.watch(job, JOB_TIMEOUT_S):
        for path, time_ns in written.items():
            with suppress(FileNotFoundError):  # the job has ended
                seen.append(path.stat().st_mtime_ns == time_ns)
        end = now
    assert end.state == pb.STATE_SUCCEEDED, end.failure
    assert all(seen)
    # While one rank collects, the other may have written.
    assert seen or place.split()[1] in ("loading", "collecting")
    assert service.record(job)["num_deaths"] == 1
    [version] = service.versions()
    assert version.version == end.router_version
    wait_until(lambda: not service.job_processes())


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


@pytest.mark.full
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


def torchrun(folder: Path, model_folder: Path, *launch: str, **spec: object) -> subprocess.Popen[str]:
    """Without a service, as a user or a Kubernetes Job starts it."""
    asked = {"modelId": "tiny", "selfGenerated": {"prompts": PROMPTS, "maxNewTokens": 24}, "maxTokens": 3000, **spec}
    job = [json.dumps(asked), "--work-dir", str(folder / "work"), "--request-id", "one"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "calibrator_service.rank", *job],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [REPOSITORY, REPOSITORY / "protos"])),
            "NEAP_MODELS": f"tiny={model_folder}",
            "NEAP_REGISTRY": f"file://{folder}/registry",
            "NEAP_THREADS": "2",
            "NEAP_RANK_TIMEOUT_S": "60",
        },
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
def test_torchrun_without_a_service_publishes_once(model_folder, tmp_path):
    for _ in range(2):
        process = torchrun(tmp_path, model_folder, "--standalone", "--nproc-per-node", "2", exitDepths=[2])
        _, said = process.communicate(timeout=JOB_TIMEOUT_S)
        assert process.returncode == 0, said[-3000:]
    # The second run has found the product of the first.
    assert '"phase": "collecting"' not in said
    registry = open_registry(f"file://{tmp_path}/registry")
    [published] = registry.list_versions("tiny")
    assert registry.resolve("tiny", "latest").version == published.version


@pytest.mark.full
def test_torchrun_ends_with_the_reason(model_folder, tmp_path):
    process = torchrun(tmp_path, model_folder, "--standalone", "--nproc-per-node", "2", exitDepths=[99])
    _, said = process.communicate(timeout=JOB_TIMEOUT_S)
    assert process.returncode == 1
    assert '"reason": "EXIT_TOO_DEEP"' in said


@pytest.mark.parametrize("spec", [{"parent": {"alias": "latest"}}, {"x": 1}])
def test_a_spec_that_is_none_is_refused(tmp_path, spec):
    with raises(InvalidInput, "BAD_SPEC"):
        rank.read_request(json.dumps({"modelId": "tiny", "selfGenerated": {}, **spec}), CalibratorSettings())


def test_a_rank_of_another_version_is_refused(tmp_path):
    """Before anything is loaded."""

    class Other(Ranks):
        def everyones(self, value: Any) -> list[Any]:
            return [value, {**value, "version_of_neap_server": "0.0.1"}]

    with raises(PreconditionFailed, "RANKS_DIFFER", match="in their version of neap server: .* rank 1 has 0.0.1"):
        rank.calibrate(Other(), "{}", "one", tmp_path, CalibratorSettings())
