"""The job store: writes of a replaced process are refused, and a job can be cancelled until it is published."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service import jobs
from calibrator_service.calibration.spec import Progress
from calibrator_service.job import Ended, Job, JobState, Problem
from calibrator_service.jobs import MAX_RESUMES, JobStore
from shared.errors import AlreadyExists, Corrupt, PreconditionFailed
from shared.registry.base import PublishedVersion
from tests.calibrator_service.conftest import REPOSITORY, rewrite
from tests.reasons import raises

SPEC = pb.CalibrationSpec(
    model_id="tiny",
    self_generated=pb.SelfGenerated(prompts=["a", "b"], max_new_tokens=5),
    time_budget=Duration(seconds=1),
    exit_depths=[1, 2],
    aliases=["latest"],
)
FINISHED = Ended(JobState.PUBLISHING)


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "jobs.db")


def create(store: JobStore, request_id: str = "one", spec: pb.CalibrationSpec = SPEC) -> Job:
    return store.create(request_id, spec, max_queued=99)


def started(store: JobStore) -> str:
    job = create(store)
    assert store.claim() is not None
    return job.calibration_id


SOURCES = {
    "self_generated": SPEC.self_generated,
    "text_file": pb.TextFile(path="a", field="b"),
    "answer_file": pb.AnswerFile(path="a"),
    "hub_dataset": pb.HubDataset(name="a", config="b"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_stored_spec_is_read_back(store, source):
    spec = with_source(**{source: SOURCES[source]})
    job_id = create(store, spec=spec).calibration_id
    assert store.get(job_id, with_prompts=True).message == spec
    assert not store.get(job_id).message.self_generated.prompts
    assert store.claim().message == spec


def with_source(**source: object) -> pb.CalibrationSpec:
    spec = pb.CalibrationSpec(**source)
    for field, value in SPEC.ListFields():
        if field.containing_oneof is None:
            spec.MergeFrom(pb.CalibrationSpec(**{field.name: value}))
    return spec


def test_an_end_is_recorded_once(store):
    job_id = started(store)
    store.record_interruption(job_id, "by test", is_death=True)
    for ended in (FINISHED, Ended(JobState.FAILED, "A", "b")):
        assert store.record_end(job_id, ended).state is JobState.QUEUED, "its process is gone"
    again = store.claim()
    assert (again.num_starts, again.num_resumes, again.num_deaths) == (2, 1, 1)
    after = store.record_end(job_id, Ended(JobState.FAILED, "A", "b"))
    assert (after.state, after.failure_reason, after.failure_message) == (JobState.FAILED, "A", "b")
    assert store.record_end(job_id, FINISHED) == after


def test_cancel_before_a_product_is_finished_wins(store):
    job_id = started(store)
    assert store.cancel(job_id).state is JobState.RUNNING
    assert store.record_end(job_id, FINISHED).state is JobState.CANCELLED
    other = create(store, "two").calibration_id
    store.claim()
    store.cancel(other)
    assert store.record_interruption(other, "killed", is_death=True).state is JobState.CANCELLED


def test_a_finished_product_outlives_every_death_of_its_process(store):
    job_id = started(store)
    store.record_end(job_id, FINISHED)
    for _ in range(2 * MAX_RESUMES):
        assert store.record_interruption(job_id, "by test", is_death=True).num_deaths == 0
    assert store.claim() is None
    now = store.get(job_id)
    assert (now.state, now.phase, now.fraction) == (JobState.PUBLISHING, "publishing", 0.99)


def test_cancel_asks_about_a_product_that_may_be_published(store):
    job_id = started(store)
    store.record_end(job_id, FINISHED)
    assert store.begin_publishing(job_id)
    store.record_attempt(job_id, "SCHEMA_TOO_NEW", "a newer neap", is_waiting=True)
    assert store.get(job_id).state is JobState.WAITING
    now = store.cancel(job_id)
    assert (now.state, now.cancel_requested) == (JobState.PUBLISHING, True)
    assert not store.begin_publishing(job_id)
    store.record_attempt(job_id, "SCHEMA_TOO_NEW", "a newer neap", is_waiting=True)
    assert store.get(job_id).state is JobState.PUBLISHING, "it must be found out by itself"
    assert store.end_publishing(job_id, None).state is JobState.CANCELLED
    lost = store.end_publishing(job_id, None, is_lost=True)
    assert lost.state is JobState.CANCELLED, "an end is final"


def test_old_jobs_are_removed_but_none_that_is_not_published(store):
    ended, unpublished, waiting = (create(store, name).calibration_id for name in "abc")
    for _ in range(2):
        for job_id in (ended, unpublished):
            store.record_interruption(job_id, "by test", is_death=False)
        for _ in (ended, unpublished):
            store.claim()
    store.record_end(ended, Ended(JobState.FAILED, "A", "b"))
    store.record_end(unpublished, FINISHED)
    end_s = store.get(ended).end_time_s
    assert end_s is not None
    assert store.remove_ended(end_s) == 0
    assert store.remove_ended(end_s + 1e9) == 1
    assert store.states() == {unpublished: "publishing", waiting: "queued"}
    assert len(store.database.rows("SELECT * FROM job_prompts")) == 2
    assert sum(count.num_resumes for count in store.count_jobs()) == 2, "a counter never falls"
    assert create(store, "a").calibration_id not in (ended, unpublished, waiting)


@pytest.mark.parametrize("end", ["cancelled while it waits", "cancelled while it runs", "failed", "published"])
def test_a_job_that_has_ended_keeps_the_digest_of_its_prompts_only(store, tmp_path, end):
    spec = with_source(self_generated=pb.SelfGenerated(prompts=["a secret of somebody", "b"]))
    job_id = create(store, spec=spec).calibration_id
    if end == "cancelled while it waits":
        store.cancel(job_id)
    else:
        store.claim()
        if end == "published":
            store.record_end(job_id, FINISHED)
            store.end_publishing(job_id, PublishedVersion("tiny", 1, "sha256:0", 0.0, 1, {}))
        else:
            state = JobState.FAILED if end == "failed" else JobState.CANCELLED
            store.record_end(job_id, Ended(state, "A", "b"))
    job = store.get(job_id, with_prompts=True)
    assert (job.state.has_ended, job.num_prompts, job.message) == (True, 2, with_source(self_generated={}))
    assert not store.database.rows("SELECT * FROM job_prompts")
    assert b"secret" not in job.spec
    assert create(store, spec=spec).calibration_id == job_id
    for other in (["a secret of somebody", "c"], [], [job.prompts_digest]):
        with pytest.raises(AlreadyExists):
            create(store, spec=with_source(self_generated={"prompts": other}))


def test_of_jobs_made_and_cancelled_fast_the_last_records_stay(store, monkeypatch):
    monkeypatch.setattr(jobs, "MAX_RECORDS", 5)
    waiting = create(store, "waits").calibration_id
    for number in range(20):
        last = store.cancel(create(store, f"request-{number}").calibration_id).calibration_id
    assert len(states := store.states()) == 6
    assert (states[waiting], states[last]) == ("queued", "cancelled")
    assert len(store.database.rows("SELECT * FROM job_prompts")) == 1


def test_a_store_of_another_version_is_refused(store, tmp_path):
    store.close()
    with sqlite3.connect(tmp_path / "jobs.db") as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(PreconditionFailed) as raised:
        JobStore(tmp_path / "jobs.db")
    assert raised.value.reason == "SCHEMA_NOT_SUPPORTED"


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


def test_every_change_is_told_and_raises_the_revision(tmp_path):
    told: list[int] = []
    store = JobStore(tmp_path / "jobs.db", lambda: told.append(store.get(job_id).revision))
    job_id = create(store).calibration_id
    store.claim()
    store.record(job_id, Progress("collecting", 7.0, {"a": 1.0}))
    assert store.get(job_id).fraction == 0.99, "published is not what it is"
    store.record(job_id, Progress("collecting", 0.5, {"b": float("nan")}))
    now = store.get(job_id)
    assert (now.fraction, now.figures.keys()) == (0.99, {"a", "b"}), "what was done stays done where it is resumed"
    store.cancel(job_id)
    store.cancel(job_id)
    store.record(job_id, Problem("DISK_FULL", "no room"))
    assert store.record_end(job_id, Ended(JobState.CANCELLED)).failure_reason == ""
    assert told == [2, 3, 4, 5, 6, 7], "a second request to cancel changes nothing"


CLAIM_15 = """import sys
from pathlib import Path
from calibrator_service.jobs import JobStore
store = JobStore(Path(sys.argv[1]))
print(*(job.calibration_id for _ in range(15) if (job := store.claim())))"""


def test_two_processes_never_claim_the_same_job(store, tmp_path):
    for number in range(20):
        create(store, str(number))
    command = [sys.executable, "-c", CLAIM_15, str(tmp_path / "jobs.db")]
    path = os.pathsep.join(map(str, [REPOSITORY, REPOSITORY / "protos"]))
    claims = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
        for _ in range(2)
    ]
    one, two = (claim.communicate(timeout=60)[0].split() for claim in claims)
    assert len(one) + len(two) == len({*one, *two}) == 20


def changed(change: Callable[[pb.CalibrationSpec], object]) -> bytes:
    spec = with_source(self_generated={})
    change(spec)
    return spec.SerializeToString()


@pytest.mark.parametrize(
    "spec",
    [
        changed(lambda spec: spec.time_budget.FromSeconds(9_300_000_000_000)),
        changed(lambda spec: setattr(spec, "label", 7)),
        changed(lambda spec: setattr(spec, "confidence_width", 8193)),
        pytest.param(changed(lambda spec: None) + b"\xaa\x06\x01a", id="a field of a newer build"),
        pytest.param(b"\x12\x04\xaa\x06\x01a", id="one of its source"),
        b"{",
    ],
)
def test_a_spec_that_cannot_be_read_has_a_reason_and_stops_no_other(store, tmp_path, spec):
    bad, good = create(store, "bad"), create(store, "good")
    rewrite(tmp_path / "jobs.db", bad.calibration_id, spec=spec)
    claimed = store.claim()
    with raises(Corrupt, "JOB_UNREADABLE", match=f"{bad.calibration_id} cannot be read") as caught:
        assert claimed.message
    assert caught.value.metadata["calibration_id"] == bad.calibration_id
    with pytest.raises(AlreadyExists):
        create(store, "bad")
    assert store.claim().message == SPEC
    assert {job.calibration_id for job in store.list()} == {bad.calibration_id, good.calibration_id}
