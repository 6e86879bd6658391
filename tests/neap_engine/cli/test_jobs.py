"""`neap jobs`, and its view of a real calibration service whose jobs do what a test wants."""

import json
import os
import signal

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb


def test_watch_shows_the_progress_and_the_version(service, neap):
    result = neap("jobs", "watch", "job-1", "--calibrator", service.address)
    assert "collecting 25% 1,234 tokens read" in result.stdout
    assert "published version 7 (sha256:abc)" in result.stdout


def test_watch_as_json_prints_every_state_and_nothing_else(service, neap):
    result = neap("jobs", "watch", "job-1", "--json", "--calibrator", service.address)
    states = [json.loads(line)["state"] for line in result.stdout.splitlines()]
    assert states == ["STATE_QUEUED", "STATE_RUNNING", "STATE_SUCCEEDED"]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_watch_fails_with_the_job(service, neap, flags):
    failure = pb.Failure(reason="DATASET_NOT_FOUND", message="no dataset x")
    service.calibration.states[-1] = {"state": pb.STATE_FAILED, "failure": failure}
    result = neap("jobs", "watch", "job-1", *flags, "--calibrator", service.address, code=1)
    assert "no dataset x [DATASET_NOT_FOUND]" in result.stderr


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_watch_ends_with_a_job_that_waits_for_somebody(service, neap, flags):
    """The service does not end the stream of such a job."""
    service.calibration.states[2:2] = [
        {
            "state": pb.STATE_RUNNING,
            "phase": pb.PHASE_PUBLISHING,
            "failure": pb.Failure(reason="REDIS_UNAVAILABLE", message="Redis does not answer"),
        },
        {"state": pb.STATE_WAITING, "failure": pb.Failure(reason="SCHEMA_TOO_NEW", message="a newer neap")},
    ]
    service.calibration.may_end.clear()
    result = neap("jobs", "watch", "job-1", *flags, "--calibrator", service.address, code=1)
    assert "a newer neap [SCHEMA_TOO_NEW]" in result.stderr
    assert "`neap jobs retry job-1` tries again" in result.stderr
    if not flags:
        assert "not published yet: Redis does not answer [REDIS_UNAVAILABLE]" in result.stderr


def test_retry_waits_for_the_version(service, neap):
    service.calibration.states[-1] = {"state": pb.STATE_WAITING}
    result = neap("jobs", "retry", "job-1", "--calibrator", service.address)
    assert "published version 7" in result.stdout


def test_ctrl_c_ends_the_watch_and_not_the_job(service, neap):
    service.calibration.may_end.clear()
    service.calibration.on_watch = lambda: os.kill(os.getpid(), signal.SIGINT)
    result = neap("jobs", "watch", "job-1", "--calibrator", service.address, code=130)
    assert "calibration job-1 goes on" in result.stderr
    assert f"`neap jobs watch job-1 --calibrator {service.address}`" in result.stderr
    assert not service.calibration.cancelled


def test_cancel_waits_for_the_end(service, neap):
    result = neap("jobs", "cancel", "job-1", "--calibrator", service.address)
    assert service.calibration.cancelled
    assert "calibration job-1 is cancelled; nothing was published" in result.stdout


def test_ctrl_c_ends_the_wait_for_a_cancelled_job(service, neap):
    service.calibration.on_watch = lambda: os.kill(os.getpid(), signal.SIGINT)
    result = neap("jobs", "cancel", "job-1", "--calibrator", service.address, code=130)
    assert "calibration job-1 was asked to stop" in result.stderr
    assert "`neap jobs watch job-1" in result.stderr


@pytest.mark.usefixtures("wide")
def test_lists_jobs_of_all_states(service, neap):
    service.calibration.states[1:1] = [
        {"state": pb.STATE_FAILED, "failure": pb.Failure(reason="DISK_FULL", message="no [room]")},
        {"state": pb.STATE_CANCELLED},
    ]
    result = neap("jobs", "list", "--calibrator", service.address)
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "│" in line and "job-1" in line]
    assert [(row[2].strip(), row[4].strip()) for row in rows] == [
        ("queued", ""),
        ("failed", "DISK_FULL"),
        ("cancelled", ""),
        ("collecting 25%", ""),
        ("succeeded", "version 7"),
    ]
    assert rows[0][3].strip() == "2026-11-22 12:00"
    assert result.stdout.splitlines()[-1] == "job-1: DISK_FULL: no [room]"
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_list_is_limited(service, neap):
    result = neap("jobs", "list", "--limit", "2", "--json", "--calibrator", service.address)
    jobs = [json.loads(line) for line in result.stdout.splitlines()]
    assert [job["state"] for job in jobs] == ["STATE_QUEUED", "STATE_RUNNING"]


def test_the_list_names_records_that_cannot_be_read(service, neap):
    service.calibration.unreadable = [
        pb.UnreadableCalibration(calibration_id="job-0", reason="JOB_UNREADABLE", message="newer \x1b[2J")
    ]
    result = neap("jobs", "list", "--calibrator", service.address)
    assert "job-0 cannot be read: newer \\u001b[2J [JOB_UNREADABLE]" in result.stderr


def test_an_empty_list_says_so(service, neap):
    service.calibration.states = []
    result = neap("jobs", "list", "--calibrator", service.address)
    assert result.stdout == "there is no job\n"
    result = neap("jobs", "list", "--model", "tiny", "--calibrator", service.address)
    assert result.stdout == "there is no job for tiny\n"
