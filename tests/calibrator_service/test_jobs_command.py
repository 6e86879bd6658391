"""`neap calibrate --detach` and `neap jobs` against a real calibration service."""

import json

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb
from typer.testing import CliRunner, Result

from neap_engine.cli.main import app
from tests.calibrator_service.conftest import Service


def neap(service: Service, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--calibrator", service.target])


@pytest.mark.full
def test_a_detached_job_is_listed_cancelled_and_watched(service, tmp_path):
    (tmp_path / "prompts.txt").write_text("wait\n")
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    started = neap(service, "calibrate", "--model", "tiny", "--detach", *prompts)
    assert started.exit_code == 0, started.output
    job_id = started.stdout.strip()
    service.wait_for(pb.Calibration(calibration_id=job_id), pb.PHASE_COLLECTING)
    waiting = neap(service, "calibrate", "--model", "tiny", "--detach").stdout.strip()

    listed = neap(service, "jobs", "list", "--model", "tiny", "--json").stdout.splitlines()
    states = [(job["calibration_id"], job["state"]) for job in map(json.loads, listed)]
    assert states == [(waiting, "STATE_QUEUED"), (job_id, "STATE_RUNNING")]

    cancelled = neap(service, "jobs", "cancel", job_id)
    assert cancelled.exit_code == 0, cancelled.output
    watched = neap(service, "jobs", "watch", job_id)
    assert watched.exit_code == 1
    assert "nothing was published" in watched.stderr

    published = neap(service, "jobs", "watch", waiting)
    assert published.exit_code == 0, published.output
    assert "published version 1" in published.stdout
    too_late = neap(service, "jobs", "cancel", waiting)
    assert too_late.exit_code == 1
    assert "succeeded before it could be cancelled (version 1)" in too_late.stderr
