"""How the supervisor handles jobs that are recorded as running but have no process."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service import job_process, service_thread
from calibrator_service import supervisor as module
from calibrator_service.calibration.spec import Progress
from calibrator_service.job import Job, JobState, Problem
from calibrator_service.job_process import JobFolder
from calibrator_service.jobs import MAX_RESUMES, JobStore
from calibrator_service.supervisor import Supervisor
from shared.calibrator_settings import CalibratorSettings
from shared.errors import Exhausted
from tests.waiting import wait_until

SPEC = pb.CalibrationSpec(model_id="tiny", self_generated=pb.SelfGenerated())


def supervisor_of(folder: Path) -> Supervisor:
    return Supervisor(JobFolder(folder), CalibratorSettings(models="tiny=/a", data_dir=folder))


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.setattr(job_process, "PROGRAM", ("-m", "fake_recipes"))
    supervisor = supervisor_of(tmp_path)
    yield supervisor
    supervisor.stop()


def create(supervisor: Supervisor, *prompts: str) -> Job:
    spec = pb.CalibrationSpec(model_id="tiny", self_generated=pb.SelfGenerated(prompts=prompts))
    return supervisor.store.create("one", spec, max_queued=9)


@pytest.mark.parametrize("before", [None, 0o755, 0o770], ids=["new", "open to all", "shared with a group"])
def test_other_users_of_the_machine_cannot_read_what_jobs_hold(tmp_path, before):
    """The job store, its log, the logs of jobs and their text are in one folder."""
    root = tmp_path / "calibrator"
    if before is not None:
        root.mkdir()
        root.chmod(before)
    service = supervisor_of(root)
    create(service, "a secret")
    mode = stat.S_IMODE(root.stat().st_mode)
    assert mode == {None: 0o700, 0o755: 0o750, 0o770: 0o770}[before]
    paths = JobFolder(root)
    assert all(path.is_relative_to(root) for path in (paths.store, paths.lock, paths.work("a"), paths.log("a")))
    service.stop()


def test_death_of_the_service_does_not_count_against_the_job(tmp_path):
    first = supervisor_of(tmp_path)
    job = create(first)
    first.stop()
    for number in range(2 * MAX_RESUMES):
        service = supervisor_of(tmp_path)
        now = service.store.get(job.calibration_id)
        assert (now.state, now.num_deaths, now.num_starts) == (JobState.QUEUED, 0, number)
        # What a service leaves behind that is killed while the job runs.
        assert service.store.claim() is not None
        service.stop()


@pytest.mark.full
def test_a_process_that_cannot_be_started_is_tried_again(supervisor, monkeypatch):
    monkeypatch.setattr(service_thread, "RETRY_INTERVAL_S", 0.05)
    real, refusals = job_process.subprocess.Popen, [OSError("no memory")] * (MAX_RESUMES + 2)

    def popen(*args: object, **kwargs: object) -> object:
        if refusals:
            raise refusals.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(job_process.subprocess, "Popen", popen)
    job = create(supervisor)
    supervisor.start()
    wait_until(lambda: supervisor.store.get(job.calibration_id).state.has_ended)
    after = supervisor.store.get(job.calibration_id)
    assert (after.state, after.num_deaths) == (JobState.SUCCEEDED, 0), after.failure_message


def test_a_process_that_says_nothing_is_killed_and_one_that_cannot_be_recorded_goes_on(supervisor, monkeypatch):
    """A full disk under the job store costs the records of progress, not the job."""
    full = [Exhausted("full", reason="DISK_FULL")]
    real = supervisor.store.record

    def record(calibration_id: str, report: Progress | Problem) -> None:
        if full:
            raise full[0]
        real(calibration_id, report)

    monkeypatch.setattr(supervisor.store, "record", record)
    job = create(supervisor, "until-told")
    supervisor.start()
    wait_until(lambda: supervisor.is_held_up)
    full.clear()
    (JobFolder(supervisor._folder.root).work(job.calibration_id) / "go").touch()
    wait_until(lambda: supervisor.store.get(job.calibration_id).state.has_ended)
    after = supervisor.store.get(job.calibration_id)
    assert (after.state, after.num_deaths) == (JobState.SUCCEEDED, 0), after.failure_message

    monkeypatch.setattr(module, "SILENCE_TIMEOUT_S", 0.0)
    stuck = supervisor.store.create("two", SPEC, max_queued=9)
    supervisor.queue.wake()
    wait_until(lambda: supervisor.store.get(stuck.calibration_id).num_deaths > 0)


def test_a_stop_just_before_the_queue_waits_is_not_missed(supervisor, monkeypatch):
    """The queue's thread has seen that no stop is requested, and forgets what woke it up only then."""
    queue = supervisor.queue
    clear = queue._wake.clear

    def stop_and_clear():
        queue.stopping.set()
        queue.wake()
        clear()

    monkeypatch.setattr(queue._wake, "clear", stop_and_clear)
    supervisor.start()
    wait_until(lambda: not supervisor.is_alive, timeout_s=20)


def test_records_and_logs_of_old_jobs_are_removed(tmp_path):
    folder = JobFolder(tmp_path)
    first = supervisor_of(tmp_path)
    kept = create(first, "one")
    old = first.store.create("two", SPEC, max_queued=9)
    first.store.cancel(old.calibration_id)
    for name in (kept.calibration_id, old.calibration_id, "cal-unknown"):
        folder.log(name).write_text("what happened")
    first.stop()
    settings = CalibratorSettings(data_dir=tmp_path, job_retention_days=1e-11)
    Supervisor(folder, settings).stop()
    assert list(folder.log_root.iterdir()) == [folder.log(kept.calibration_id)]
    store = JobStore(folder.store)
    assert store.states() == {kept.calibration_id: "queued"}
    store.close()
