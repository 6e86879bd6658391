"""The job store: writes of a replaced process are refused, and a job can be cancelled until it publishes."""

import multiprocessing
from pathlib import Path

import pytest

from calibrator_service.calibration.spec import (
    AnswerFile,
    CalibrationSpec,
    HubDataset,
    SelfGenerated,
    TextFile,
)
from calibrator_service.job import Job, JobState
from calibrator_service.jobs import MAX_RESUMES, JobStore
from shared.errors import Cancelled, Conflict, Corrupt
from tests.calibrator_service.conftest import rewrite

SPEC = CalibrationSpec("tiny", SelfGenerated(("a", "b"), 5), time_budget_s=1.5, rung_depths=(1, 2))


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.db")


def create(store: JobStore, request_id: str = "one", spec: CalibrationSpec = SPEC) -> Job:
    return store.create(request_id, spec, ["latest"], max_queued=99, answer=lambda job: job)


def started(store: JobStore) -> str:
    job = create(store)
    assert store.claim() is not None
    return job.calibration_id


@pytest.mark.parametrize(
    "source", [SPEC.source, TextFile("a", "b"), AnswerFile("a"), HubDataset("a", "b")]
)
def test_a_stored_spec_is_read_back(store, source):
    spec = CalibrationSpec(
        "tiny", source, time_budget_s=1.5, rung_depths=(1, 2), head_form="affine"
    )
    assert create(store, spec=spec).spec == spec


def test_a_replaced_process_cannot_write(store):
    job_id = started(store)
    store.heartbeat(job_id, 1)
    store.record_interruption(job_id, "by test", is_death=True)
    again = store.claim()
    assert again is not None
    assert (again.num_starts, again.num_resumes, again.num_deaths) == (2, 1, 1)
    for call in (
        lambda: store.heartbeat(job_id, 1),
        lambda: store.progress(job_id, 1, "collecting", 0.5, {}),
        lambda: store.begin_publishing(job_id, 1),
        lambda: store.succeed(job_id, 1, 1, "sha256:"),
        lambda: store.fail(job_id, 1, "A", "b"),
        lambda: store.record_cancelled(job_id, 1),
    ):
        with pytest.raises(Conflict):
            call()
    assert store.get(job_id) == again


def test_cancel_before_publishing_wins(store):
    job_id = started(store)
    assert store.cancel(job_id).state is JobState.RUNNING
    assert store.heartbeat(job_id, 1)
    with pytest.raises(Cancelled):
        store.begin_publishing(job_id, 1)
    assert store.record_interruption(job_id, "killed", is_death=True).state is JobState.CANCELLED


def test_publishing_before_cancel_wins_even_over_a_death(store):
    job_id = started(store)
    store.begin_publishing(job_id, 1)
    assert not store.cancel(job_id).cancel_requested
    assert not store.heartbeat(job_id, 1)
    store.record_interruption(job_id, "by test", is_death=True)
    assert store.cancel(job_id).state is JobState.QUEUED, "it may have been published already"
    store.claim()
    store.succeed(job_id, 2, 4, "sha256:x")
    assert (store.get(job_id).state, store.get(job_id).router_version) == (JobState.SUCCEEDED, 4)


def test_stops_of_the_service_do_not_count_as_deaths(store):
    job_id = started(store)
    for _ in range(3 * MAX_RESUMES):
        assert store.record_interruption(job_id, "stop", is_death=False).state is JobState.QUEUED
        store.claim()
    assert store.get(job_id).num_resumes == 3 * MAX_RESUMES
    for _ in range(MAX_RESUMES):
        assert store.record_interruption(job_id, "by test", is_death=True).state is JobState.QUEUED
        store.claim()
    failed = store.record_interruption(job_id, "by test", is_death=True)
    assert (failed.state, failed.failure_reason) == (JobState.FAILED, "JOB_PROCESS_DIED")


def test_progress_changes_the_revision_and_heartbeats_do_not(store):
    job_id = started(store)
    before = store.get(job_id).revision
    store.heartbeat(job_id, 1)
    assert store.get(job_id).revision == before
    store.progress(job_id, 1, "collecting", 7.0, {"a": 1.0})
    store.progress(job_id, 1, "collecting", 0.5, {"b": float("nan")})
    now = store.get(job_id)
    assert now.revision > before
    assert now.figures.keys() == {"a", "b"}


def _claim(path: Path, number: int) -> list[str]:
    store = JobStore(path)
    claimed = []
    for _ in range(number):
        job = store.claim()
        if job is not None:
            claimed.append(job.calibration_id)
    return claimed


def test_two_processes_never_claim_the_same_job(store, tmp_path):
    for number in range(20):
        create(store, str(number))
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        one, two = processes.starmap(_claim, [(tmp_path / "jobs.db", 15)] * 2)
    assert len(one) + len(two) == len({*one, *two}) == 20


def test_a_job_whose_answer_fails_is_not_kept(store):
    def refuse(job: Job) -> None:
        raise ValueError(job.calibration_id)

    with pytest.raises(ValueError, match="cal-"):
        store.create("one", SPEC, [], max_queued=9, answer=refuse)
    assert store.list() == []
    assert store.claim() is None


NEWER_SPEC = '{"model_id": "tiny", "source": {"kind": "Radio"}}'


@pytest.mark.parametrize(
    "spec",
    [
        NEWER_SPEC,
        SPEC.to_json().replace("1.5", "9.3e18"),
        SPEC.to_json().replace('"seed"', '"sea"'),
        SPEC.to_json().replace("agreement", "accord"),
        "[]",
        "{",
    ],
)
def test_the_queue_passes_over_a_spec_that_cannot_be_read(store, tmp_path, spec):
    bad, good = create(store, "bad"), create(store, "good")
    rewrite(tmp_path / "jobs.db", bad.calibration_id, spec=spec)
    claimed = store.claim()
    assert claimed is not None
    with pytest.raises(Corrupt) as raised:
        _ = claimed.spec
    assert raised.value.reason == "JOB_UNREADABLE"
    assert raised.value.metadata["calibration_id"] == bad.calibration_id
    store.fail(bad.calibration_id, 1, raised.value.reason, raised.value.message)
    after = store.get(bad.calibration_id)
    assert (after.state, after.failure_reason) == (JobState.FAILED, "JOB_UNREADABLE")
    claimed = store.claim()
    assert claimed is not None
    assert (claimed.calibration_id, claimed.spec) == (good.calibration_id, SPEC)
