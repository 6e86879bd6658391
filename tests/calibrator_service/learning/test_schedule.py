"""The schedule of learning jobs: over a real registry and job store, without processes of jobs."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service.calibration.spec import CalibrationSpec, ServedTraffic
from calibrator_service.job import Ended, Job, JobState
from calibrator_service.jobs import JobStore
from calibrator_service.learning import schedule as module
from calibrator_service.learning.schedule import LearningSchedule
from calibrator_service.metrics import CalibratorMetrics
from calibrator_service.spec_messages import read_spec
from shared.calibrator_settings import CalibratorSettings
from shared.errors import Unavailable
from shared.ladder.blob_names import LADDER_BLOB, STATISTICS_BLOB
from shared.registry import lease
from shared.registry.base import Canary
from shared.registry.factory import open_registry, open_store
from shared.registry.names import learning_note
from shared.traffic.answer import ServedAnswer
from shared.traffic.traffic import Batch, Traffic, open_traffic

MODEL = "tiny"
LABELS = (
    ("new_tokens", {"model_id": MODEL, "pool": "legal"}),
    ("jobs_total", {"model_id": MODEL, "state": "cancelled"}),
)


class Place:
    """A registry, and services on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = open_registry(str(folder / "registry"))
        self.traffic = open_traffic(str(folder / "registry"))
        self.services: list[SimpleNamespace] = []

    def service(
        self,
        name: str = "one",
        traffic: Traffic | None = None,
        has_lost: Callable[[str, str], bool] = lambda model_id, alias: False,
        **options: object,
    ) -> SimpleNamespace:
        settings = CalibratorSettings(
            models=f"{MODEL}=/a",
            data_dir=self.folder / name,
            registry=str(self.folder / "registry"),
            learn_from_traffic=True,
            **{"learn_tokens": 50, "learn_interval_s": 0.0, **options},
        )
        store = JobStore(self.folder / f"{name}.db")
        woken: list[None] = []
        metrics = CalibratorMetrics()
        schedule = LearningSchedule(
            self.registry,
            traffic or self.traffic,
            store,
            settings,
            lambda: woken.append(None),
            has_lost,
            metrics=metrics,
        )
        found = SimpleNamespace(store=store, schedule=schedule, woken=woken, metrics=metrics)
        self.services.append(found)
        return found

    def serve(self, pool: str = "default", num_tokens: int = 60) -> None:
        half = num_tokens // 2
        self.traffic.write([ServedAnswer(MODEL, pool, 0, "cpu", 480_000, [1] * half, [2] * (num_tokens - half))])

    def publish(self, number: int, *aliases: str, pool: str = "", statistics: bool = True) -> int:
        blobs = {LADDER_BLOB: b"ladder", **({STATISTICS_BLOB: b"sums"} if statistics else {})}
        manifest = {"number": number, **({"pool": pool} if pool else {})}
        return self.registry.publish(MODEL, manifest, blobs, request_id=str(number), aliases=aliases).version


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.0)
    place = Place(tmp_path)
    yield place
    for service in place.services:
        service.store.close()
    place.registry.close()


def jobs(service: SimpleNamespace) -> list[Job]:
    return service.store.list()[::-1]


def end(service: SimpleNamespace, job: Job, ended: Ended | None = None) -> None:
    """The job is run, and ends so."""
    assert service.store.claim().calibration_id == job.calibration_id
    service.store.record_end(job.calibration_id, ended or Ended(JobState.CANCELLED))


def spec_of(job: Job) -> CalibrationSpec:
    return read_spec(job.spec, job.calibration_id)[1]


def test_a_pool_with_enough_new_answers_learns_and_then_waits_for_more(place):
    service = place.service()
    place.serve("legal", 30)
    service.schedule._look()
    assert not jobs(service)
    place.serve("legal", 30)
    service.schedule._look()
    (job,) = jobs(service)
    spec = spec_of(job)
    assert (spec.source, list(job.message.aliases), spec.parent) == (ServedTraffic("legal"), ["latest@legal"], None)
    assert spec.time_budget_s == 150.0
    assert service.woken
    note = place.registry.note(learning_note(MODEL, "legal"))
    assert (note["last_job"], note["why"], note["outcome"]) == (job.calibration_id, "60 new tokens", "")
    assert (note["least_tokens"], note["next_s"]) == (50, note["began_s"])
    service.schedule._look()
    assert len(jobs(service)) == 1  # it runs
    end(service, job)
    service.schedule._look()
    assert len(jobs(service)) == 1  # nothing new
    assert place.registry.note(learning_note(MODEL, "legal"))["outcome"] == "cancelled"
    samples = {
        name: service.metrics.registry.get_sample_value(f"neap_learning_{name}", labels) for name, labels in LABELS
    }
    assert samples == {"new_tokens": 0, "jobs_total": 1}
    place.serve("legal", 60)
    service.schedule._look()
    assert len(jobs(service)) == 2


def test_the_pool_of_all_moves_the_models_own_alias(place):
    service = place.service()
    place.serve()
    service.schedule._look()
    assert [list(job.message.aliases) for job in jobs(service)] == [["latest"]]


def test_a_job_goes_on_from_the_pools_router_else_from_the_models(place):
    service = place.service()
    own = place.publish(1, "latest")
    place.serve("legal")
    place.serve("shop")
    theirs = place.publish(2, "latest@legal", pool="legal")
    service.schedule._look()
    (legal,) = jobs(service)  # one at a time
    end(service, legal)
    service.schedule._look()
    (_, shop) = jobs(service)
    assert [spec_of(job).parent.version for job in (legal, shop)] == [theirs, own]


def test_a_router_of_another_pool_is_nobodys_parent(place):
    """However an alias came to name it."""
    service = place.service()
    place.publish(1, "latest@legal", "latest", pool="shop")
    place.serve("legal")
    service.schedule._look()
    assert spec_of(jobs(service)[0]).parent is None


def test_a_parent_without_statistics_is_left_out(place):
    service = place.service()
    place.publish(1, "latest", statistics=False)
    place.serve()
    service.schedule._look()
    assert spec_of(jobs(service)[0]).parent is None
    end(service, jobs(service)[0])
    place.serve("legal")  # a pool needs its heads alone
    service.schedule._look()
    assert spec_of(jobs(service)[-1]).parent.version == 1
    assert spec_of(jobs(service)[-1]).may_have_parents_heads


def test_a_restart_goes_on(place):
    first = place.service()
    place.serve("legal")
    first.schedule._look()
    end(first, jobs(first)[0])
    first.schedule._look()
    first.schedule.stop()
    second = place.service("two")
    second.schedule._look()
    assert not jobs(second)
    place.serve("legal")
    second.schedule._look()
    assert len(jobs(second)) == 1


def test_killed_before_it_noted_a_job_it_finds_that_job(place, monkeypatch):
    service = place.service()
    place.serve("legal")

    def fail(*_: object) -> None:
        raise Unavailable("gone", reason="STORAGE")

    with monkeypatch.context() as patch:
        patch.setattr(place.registry, "keep_note", fail)
        service.schedule._look()
    assert len(jobs(service)) == 1
    end(service, jobs(service)[0])
    service.schedule._look()
    service.schedule._look()
    assert len(jobs(service)) == 1


def test_of_two_services_one_acts_and_the_other_takes_over(place):
    first, second = place.service("one"), place.service("two")
    place.serve("legal")
    first.schedule._look()
    second.schedule._look()
    assert (len(jobs(first)), len(jobs(second))) == (1, 0)
    first.schedule.stop()
    place.serve("shop")
    second.schedule._look()
    # What runs at the other is not begun again: that pool has nothing new.
    assert [list(job.message.aliases) for job in jobs(second)] == [["latest@shop"]]


def test_clients_jobs_come_first(place):
    service = place.service()
    client = service.store.create(
        "a", pb.CalibrationSpec(model_id=MODEL, self_generated=pb.SelfGenerated()), max_queued=9
    )
    place.serve("legal")
    service.schedule._look()
    assert len(jobs(service)) == 1
    assert service.store.claim().calibration_id == client.calibration_id
    service.schedule._look()
    assert len(jobs(service)) == 2


def test_a_version_on_trial_is_waited_for(place):
    service = place.service()
    place.publish(1, "latest@legal")
    place.publish(2)
    place.registry.set_canary(MODEL, "latest@legal", Canary(2, 50))
    place.serve("legal")
    place.serve("shop")
    service.schedule._look()
    assert [list(job.message.aliases) for job in jobs(service)] == [["latest@shop"]]
    end(service, jobs(service)[0])
    place.registry.promote_canary(MODEL, "latest@legal")
    service.schedule._look()
    assert [list(job.message.aliases) for job in jobs(service)] == [["latest@shop"], ["latest@legal"]]


def test_where_acceptance_was_lost_less_text_does(place):
    lost: set[tuple[str, str]] = set()
    service = place.service(has_lost=lambda *alias: alias in lost)
    place.serve("legal", 10)
    service.schedule._look()
    assert not jobs(service)
    lost.add((MODEL, "latest@legal"))
    service.schedule._look()
    assert [list(job.message.aliases) for job in jobs(service)] == [["latest@legal"]]


def test_a_job_that_failed_is_repeated_after_longer_and_longer(place, monkeypatch):
    service = place.service(learn_interval_s=100.0)
    place.publish(1, "latest")
    place.serve("legal")
    now_s = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now_s)
    service.schedule._look()
    (job,) = jobs(service)
    end(service, job, Ended(JobState.FAILED, "TOO_LITTLE_TEXT", "too little"))
    now_s += 150
    service.schedule._look()
    assert len(jobs(service)) == 1
    now_s += 60
    service.schedule._look()
    assert len(jobs(service)) == 2
    assert spec_of(jobs(service)[1]).parent is not None


def test_a_version_that_did_not_pass_its_checks_is_said(place):
    service = place.service()
    place.serve("legal")
    service.schedule._look()
    (job,) = jobs(service)
    manifest = {"checks": {"figures": {"passed": True}, "confidence": {"passed": False, "detail": "depth-0"}}}
    blobs = {LADDER_BLOB: b"ladder"}
    version = place.registry.publish(MODEL, manifest, blobs, request_id=job.calibration_id, aliases=())
    end(service, job, Ended(JobState.PUBLISHING))
    service.store.begin_publishing(job.calibration_id)
    service.store.end_publishing(job.calibration_id, version)
    service.schedule._look()
    outcome = place.registry.note(learning_note(MODEL, "legal"))["outcome"]
    assert outcome == "succeeded, but version 1 did not pass its checks (confidence): no alias names it"


@pytest.mark.parametrize("reason", ["ROUTER_MISMATCH", "CORRUPT"])
def test_where_the_parent_was_the_reason_the_next_has_none(place, reason):
    service = place.service()
    place.publish(1, "latest")
    place.serve("legal")
    service.schedule._look()
    end(service, jobs(service)[0], Ended(JobState.FAILED, reason, "of another model, or damaged"))
    service.schedule._look()
    assert [spec_of(job).parent is None for job in jobs(service)] == [False, True]


def test_one_pool_that_cannot_be_read_stops_no_other(place, monkeypatch):
    service = place.service()
    place.serve("bad")
    place.serve("good")
    real = place.traffic.batches

    def batches(model_id: str, pool: str) -> object:
        if pool == "bad":
            raise Unavailable("gone", reason="STORAGE")
        return real(model_id, pool)

    monkeypatch.setattr(place.traffic, "batches", batches)
    (place.folder / "registry" / "traffic" / MODEL / "Not A Pool").mkdir()
    service.schedule._look()
    assert [list(job.message.aliases) for job in jobs(service)] == [["latest@good"]]


def test_pools_that_always_have_new_answers_keep_no_other_waiting(place):
    service, learned = place.service(), []
    place.serve("quiet")
    for _ in range(12):
        place.serve("busy-one")
        place.serve("busy-two")
        service.schedule._look()
        job = service.store.in_state(JobState.QUEUED)[0]
        learned.append(job.message.aliases[0].removeprefix("latest@"))
        end(service, job)
    assert learned.index("quiet") < 3
    assert min(learned.count(name) for name in ("busy-one", "busy-two")) >= 4


def test_a_damaged_note_is_as_none(place):
    service = place.service()
    place.serve("legal")
    service.schedule._look()
    end(service, jobs(service)[0])
    service.schedule._look()
    (note,) = (place.folder / "registry" / "notes").glob("learning-*")
    note.write_bytes(b"nonsense")
    service.schedule._look()
    service.schedule._look()
    assert len(jobs(service)) == 1  # the job of these answers is known
    place.registry.keep_note(note.stem, {"counted_s": "soon", "num_failed": 1.5, "began_s": 0.0})
    place.serve("legal")
    service.schedule._look()
    assert len(jobs(service)) == 2


def test_what_is_kept_is_listed_only_when_a_job_may_begin(place, monkeypatch):
    listed: list[str] = []
    batches = place.traffic.batches
    monkeypatch.setattr(place.traffic, "batches", lambda *at: listed.append(at[1]) or batches(*at))
    now_s = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now_s)
    service = place.service(learn_interval_s=1800.0)
    place.serve("legal")
    service.schedule._look()
    end(service, jobs(service)[0])
    for _ in range(60):
        service.schedule._look()
    assert listed == ["legal"]
    now_s += 1800
    place.serve("legal")
    service.schedule._look()
    assert (listed, len(jobs(service))) == (["legal", "legal"], 2)


def test_a_look_that_takes_longer_than_the_lease_reaches_every_pool(place, monkeypatch):
    now_s = 1000.0

    class Slow(Traffic):
        def batches(self, model_id: str, pool: str) -> list[Batch]:
            nonlocal now_s
            now_s += 12.0
            return super().batches(model_id, pool)

    monkeypatch.setattr(lease, "elapsed_s", lambda: now_s)
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    service = place.service(traffic=Slow(open_store(str(place.folder / "registry"))), learn_tokens=10**6)
    seen: list[str] = []
    monkeypatch.setattr(
        service.schedule,
        "consider",
        lambda model_id, pool, to=service.schedule.consider: (seen.append(pool), to(model_id, pool)),
    )
    pools = [f"pool-{number}" for number in range(9)]
    for pool in pools:
        place.serve(pool)
    service.schedule._look()
    assert seen == pools


def test_old_answers_are_removed(place):
    kept = place.service(traffic_days=1.0)
    place.serve("legal")
    kept.schedule._look()
    assert place.traffic.batches(MODEL, "legal")
    kept.schedule.stop()
    with closing(open_registry(str(place.folder / "registry"))):
        gone = place.service("two", traffic_days=1e-9)
        gone.schedule._look()
    assert not place.traffic.batches(MODEL, "legal")
