"""The job store by itself: what a process that was replaced may no longer do, and where cancelling ends."""

import multiprocessing
from pathlib import Path

import pytest

from calibrator_service.job import JobState
from calibrator_service.job_spec import HubDataset, JobSpec, SelfGenerated, TextFile
from calibrator_service.jobs import MAX_RESUMES, JobStore
from shared.errors import Cancelled, Conflict

SPEC = JobSpec("tiny", SelfGenerated(("a", "b"), 5), time_budget_s=1.5, rung_depths=(1, 2))


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.db")


def started(store: JobStore) -> str:
    job = store.create("one", SPEC, ["latest"], max_queued=9)
    assert store.claim() is not None
    return job.calibration_id


@pytest.mark.parametrize("source", [SPEC.source, TextFile("a", "b"), HubDataset("a", "b")])
def test_specs_survive_the_store(store: JobStore, source: SelfGenerated) -> None:
    spec = JobSpec("tiny", source, time_budget_s=1.5, rung_depths=(1, 2), head_form="affine")
    assert store.create("one", spec, ["latest", "x"], max_queued=1).spec == spec


def test_a_replaced_process_can_do_nothing(store: JobStore) -> None:
    job_id = started(store)
    store.heartbeat(job_id, 1)
    store.interrupted(job_id, "by test", is_death=True)
    again = store.claim()
    assert again is not None
    assert (again.num_starts, again.num_resumes, again.num_deaths) == (2, 1, 1)
    for call in (
        lambda: store.heartbeat(job_id, 1),
        lambda: store.progress(job_id, 1, "collecting", 0.5, {}),
        lambda: store.begin_publishing(job_id, 1),
        lambda: store.succeed(job_id, 1, 1, "sha256:"),
        lambda: store.fail(job_id, 1, "A", "b"),
        lambda: store.cancelled(job_id, 1),
    ):
        with pytest.raises(Conflict):
            call()
    assert store.get(job_id) == again


def test_cancel_before_publishing_wins(store: JobStore) -> None:
    job_id = started(store)
    assert store.cancel(job_id).state is JobState.RUNNING
    assert store.heartbeat(job_id, 1)
    with pytest.raises(Cancelled):
        store.begin_publishing(job_id, 1)
    assert store.interrupted(job_id, "killed", is_death=True).state is JobState.CANCELLED


def test_publishing_before_cancel_wins_even_over_a_death(store: JobStore) -> None:
    job_id = started(store)
    store.begin_publishing(job_id, 1)
    assert not store.cancel(job_id).cancel_requested
    assert not store.heartbeat(job_id, 1)
    store.interrupted(job_id, "by test", is_death=True)
    assert store.cancel(job_id).state is JobState.QUEUED, "it may have been published already"
    store.claim()
    store.succeed(job_id, 2, 4, "sha256:x")
    assert (store.get(job_id).state, store.get(job_id).router_version) == (JobState.SUCCEEDED, 4)


def test_stops_of_the_service_do_not_count_as_deaths(store: JobStore) -> None:
    job_id = started(store)
    for _ in range(3 * MAX_RESUMES):
        assert store.interrupted(job_id, "stop", is_death=False).state is JobState.QUEUED
        store.claim()
    assert store.get(job_id).num_resumes == 3 * MAX_RESUMES
    for _ in range(MAX_RESUMES):
        assert store.interrupted(job_id, "by test", is_death=True).state is JobState.QUEUED
        store.claim()
    failed = store.interrupted(job_id, "by test", is_death=True)
    assert (failed.state, failed.failure_reason) == (JobState.FAILED, "JOB_PROCESS_DIED")


def test_heartbeats_are_no_news_and_progress_is(store: JobStore) -> None:
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


def test_two_processes_never_claim_the_same_job(store: JobStore, tmp_path: Path) -> None:
    for number in range(20):
        store.create(str(number), SPEC, [], max_queued=99)
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        one, two = processes.starmap(_claim, [(tmp_path / "jobs.db", 15)] * 2)
    assert len(one) + len(two) == len({*one, *two}) == 20
