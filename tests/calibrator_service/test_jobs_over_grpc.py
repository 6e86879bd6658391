"""CalibrationService end to end: a real service process and real job processes, with fake_recipes in place of the calibration."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap.calibration.v1 import calibration_pb2 as pb
from neap.router.v1 import router_pb2

from shared.errors import AlreadyExists, Corrupt, Exhausted, InvalidInput, NotFound
from shared.rpc.status import from_rpc_error
from tests.calibrator_service.conftest import Service, error_of, rewrite
from tests.fuzzing import extremes
from tests.waiting import wait_until

StartService = Callable[..., Service]


def versions(service: Service, model_id: str = "tiny") -> list[router_pb2.RouterVersion]:
    request = router_pb2.ListVersionsRequest(model_id=model_id)
    return list(service.routers.ListVersions(request, timeout=60).versions)


def test_job_from_create_to_published(service):
    job = service.create(aliases=["stable"], rung_depths=[1], seed=7)
    assert job.calibration_id.startswith("cal-")
    seen = list(service.watch(job))
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
    (published,) = versions(service)
    assert (end.router_version, end.manifest_digest) == (1, published.manifest_digest)
    aliases = service.routers.ListAliases(router_pb2.ListAliasesRequest(model_id="tiny")).aliases
    assert [(alias.name, alias.version) for alias in aliases] == [("latest", 1), ("stable", 1)]
    assert service.get(job) == end
    assert list(service.watch(job)) == [end]
    assert end.spec.seed == 7
    assert list(end.spec.rung_depths) == [1]
    assert end.spec.label == pb.LABEL_AGREEMENT
    wait_until(lambda: not list((service.folder / "calibrator" / "work").iterdir()))


def test_request_id_names_one_job(service):
    job = service.create()
    assert service.create().calibration_id == job.calibration_id
    error = error_of(lambda: service.create(seed=1))
    assert isinstance(error, AlreadyExists)
    assert error.metadata["calibration_id"] == job.calibration_id
    assert isinstance(error_of(lambda: service.create(aliases=["other"])), AlreadyExists)
    service.end_of(job)
    assert service.create().calibration_id == job.calibration_id
    assert len(versions(service)) == 1


BAD_SPECS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown model": ({"model_id": "unknown"}, NotFound, "MODEL_NOT_FOUND"),
    "bad model id": ({"model_id": "../tiny"}, InvalidInput, "BAD_MODEL_ID"),
    "no model id": ({"model_id": ""}, InvalidInput, "BAD_MODEL_ID"),
    "bad alias": ({"aliases": ["No Way"]}, InvalidInput, "BAD_ALIAS"),
    "unknown label": ({"label": 77}, InvalidInput, "BAD_SPEC"),
    "unknown head": ({"head_form": 77}, InvalidInput, "BAD_SPEC"),
    "no time": ({"time_budget": Duration(seconds=0)}, InvalidInput, "BAD_SPEC"),
    "negative time": ({"time_budget": Duration(seconds=-5)}, InvalidInput, "BAD_SPEC"),
    "longest time": ({"time_budget": Duration(seconds=2**63 - 1)}, InvalidInput, "BAD_SPEC"),
    "over a week": ({"time_budget": Duration(seconds=604_801)}, InvalidInput, "BAD_SPEC"),
    "nanos out of range": ({"time_budget": Duration(nanos=10**9)}, InvalidInput, "BAD_SPEC"),
    "mixed signs": ({"time_budget": Duration(seconds=5, nanos=-1)}, InvalidInput, "BAD_SPEC"),
    "huge seed": ({"seed": 2**64 - 1}, InvalidInput, "BAD_SPEC"),
    "NaN threshold": ({"cosine_threshold": float("nan"), "label": 2}, InvalidInput, "BAD_SPEC"),
    "threshold beyond 1": ({"cosine_threshold": 1.5, "label": 2}, InvalidInput, "BAD_SPEC"),
    "control characters": (
        {"hub_dataset": pb.HubDataset(name="a\x1b[2J")},
        InvalidInput,
        "BAD_SPEC",
    ),
    "a long field": (
        {"text_file": pb.TextFile(path="a", field="x" * 1001)},
        InvalidInput,
        "BAD_TEXT_FILE",
    ),
    "depth twice": ({"rung_depths": [2, 2]}, InvalidInput, "BAD_SPEC"),
}


def test_bad_specs_are_refused_at_once(service):
    for name, (spec, kind, reason) in BAD_SPECS.items():
        error = error_of(lambda spec=spec: service.create(**spec))
        assert isinstance(error, kind), (name, error)
        assert error.reason == reason or not reason, (name, error.reason)
        if "time_budget" in spec:
            assert error.metadata["field"] == "spec.time_budget", name
    for request_id in ("", "x" * 129):
        error = error_of(lambda request_id=request_id: service.create(request_id=request_id))
        assert error.reason == "BAD_REQUEST_ID"
    for request, reason in (
        (pb.CreateCalibrationRequest(request_id="x"), "BAD_SPEC"),
        (
            pb.CreateCalibrationRequest(request_id="x", spec=pb.CalibrationSpec(model_id="tiny")),
            "SOURCE_REQUIRED",
        ),
    ):
        error = error_of(lambda r=request: service.calibrations.CreateCalibration(r, timeout=60))
        assert (type(error), error.reason) == (InvalidInput, reason)
    listed = service.calibrations.ListCalibrations(pb.ListCalibrationsRequest())
    assert not listed.calibrations


def test_text_files_must_be_in_an_allowed_folder(start_service, tmp_path):
    allowed, secret = tmp_path / "texts", tmp_path / "secret.txt"
    allowed.mkdir()
    secret.write_text("secret")
    (allowed / "link.txt").symlink_to(secret)
    (allowed / "data.bin").write_text("no")
    (allowed / "good.txt").write_text("good")
    service = start_service("--model", "tiny=/nowhere", "--text-folder", str(allowed))

    def create(path: str) -> pb.Calibration:
        return service.create(text_file=pb.TextFile(path=path), request_id=path[:99])

    for path in (
        str(secret),
        "/etc/passwd",
        "../secret.txt",
        f"{allowed}/../secret.txt",
        str(allowed / "link.txt"),
        "/no/such/file.txt",
    ):
        error = error_of(lambda path=path: create(path))
        assert (type(error), error.reason) == (InvalidInput, "PATH_NOT_ALLOWED"), path
    assert error_of(lambda: create("missing.txt")).reason == "TEXT_FILE_NOT_FOUND"
    assert error_of(lambda: create("data.bin")).reason == "BAD_TEXT_FILE"
    long_name = error_of(lambda: service.create(text_file=pb.TextFile(path="x" * 5000 + ".txt")))
    assert long_name.reason == "BAD_TEXT_FILE"
    for path in ("good.txt", str(allowed / "good.txt")):
        assert create(path).spec.text_file.path == path


def test_datasets_must_be_on_the_hub_and_allowed(start_service, tmp_path):
    service = start_service("--model", "tiny=/nowhere", "--hub-dataset", "good/*")

    def refused(request_id: str, **hub: str) -> tuple[type[Exception], str]:
        error = error_of(
            lambda: service.create(hub_dataset=pb.HubDataset(**hub), request_id=request_id)
        )
        return type(error), error.reason

    for name in (str(tmp_path), "./data", "~/data", "hf://datasets/good/a", "text", "good/a/b"):
        assert refused(name, name=name) == (InvalidInput, "BAD_DATASET_NAME")
    assert refused("1", name="other/set") == (InvalidInput, "DATASET_NOT_ALLOWED")
    assert refused("2", name="good/a", split="train[:1%]") == (InvalidInput, "BAD_DATASET_SPLIT")
    listed = service.calibrations.ListCalibrations(pb.ListCalibrationsRequest())
    assert not listed.calibrations
    hub = pb.HubDataset(name="good/a", config="b", split="dev", field="c")
    assert service.create(hub_dataset=hub).spec.hub_dataset == hub


def test_text_files_need_a_folder(service):
    error = error_of(lambda: service.create(text_file=pb.TextFile(path="/etc/hosts.txt")))
    assert error.reason == "PATH_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("behaviour", "reason", "said"),
    [
        ("no-model", "MODEL_NOT_FOUND", "/nowhere"),
        ("unsupported", "UNSUPPORTED_MODEL", "decoder layers"),
        ("no-dataset", "DATASET_NOT_FOUND", "nobody/nothing"),
        ("full-work-dir", "DISK_FULL", "space"),
        ("full-registry", "DISK_FULL", "nothing was published"),
        ("bug", "INTERNAL", "internal error"),
    ],
)
def test_failures_say_why_and_publish_nothing(service, behaviour, reason, said):
    """full-registry: fsync of every file in the registry's folder raises ENOSPC in the job's process."""
    end = service.end_of(service.create(behaviour))
    assert end.state == pb.STATE_FAILED
    assert end.failure.reason == reason
    assert said in end.failure.message
    assert "secret" not in end.failure.message
    assert versions(service) == []
    registry = service.folder / "registry"
    left = [
        path
        for kind in ("blobs", "staging")
        for path in (registry / kind).rglob("*")
        if path.is_file()
    ]
    assert left == []
    if behaviour == "bug":
        log = service.folder / "calibrator" / "logs" / f"{end.calibration_id}.log"
        assert "secret detail" in log.read_text()
    # The queue goes on.
    assert service.end_of(service.create(request_id="next")).state == pb.STATE_SUCCEEDED


@pytest.mark.parametrize("behaviour", ["wait", "deaf"])
@pytest.mark.full
def test_cancelling_a_running_job(service, behaviour):
    """ "deaf" never asks whether it should stop, and is killed."""
    job = service.create(behaviour)
    service.wait_for(job, pb.PHASE_COLLECTING)
    request = pb.CancelCalibrationRequest(calibration_id=job.calibration_id)
    assert service.calibrations.CancelCalibration(request).calibration.state == pb.STATE_RUNNING
    assert service.end_of(job).state == pb.STATE_CANCELLED
    again = service.calibrations.CancelCalibration(request).calibration
    assert again.state == pb.STATE_CANCELLED
    assert versions(service) == []
    wait_until(lambda: not service.job_processes())


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
    assert len(versions(service)) == 1


def test_listing_pages_and_filters(start_service):
    service = start_service("--model", "tiny=/a", "--model", "other=/b")
    service.wait_for(service.create("wait", "blocker"), pb.PHASE_COLLECTING)
    ids = [service.create("wait", str(n), model_id="other").calibration_id for n in range(3)]
    page = service.calibrations.ListCalibrations
    first = page(pb.ListCalibrationsRequest(model_id="other", page_size=2))
    assert [job.calibration_id for job in first.calibrations] == [ids[2], ids[1]]
    token = first.next_page_token
    rest = page(pb.ListCalibrationsRequest(model_id="other", page_size=2, page_token=token))
    assert [job.calibration_id for job in rest.calibrations] == [ids[0]]
    assert rest.next_page_token == ""
    assert len(page(pb.ListCalibrationsRequest(page_size=2**32 - 1)).calibrations) == 4
    error = error_of(lambda: page(pb.ListCalibrationsRequest(page_token="'; --")))
    assert error.reason == "BAD_PAGE_TOKEN"


def test_full_queue(start_service):
    service = start_service("--model", "tiny=/a", "--max-queued-jobs", "1")
    service.wait_for(service.create("wait", "running"), pb.PHASE_COLLECTING)
    service.create("wait", "waiting")
    error = error_of(lambda: service.create("wait", "too many"))
    assert isinstance(error, Exhausted)
    assert error.reason == "QUEUE_FULL"
    assert error.retry_after_s is not None
    assert service.create("wait", "waiting").state == pb.STATE_QUEUED


def test_unknown_job(service):
    for method, request in (
        ("GetCalibration", pb.GetCalibrationRequest(calibration_id="cal-0")),
        ("CancelCalibration", pb.CancelCalibrationRequest(calibration_id="")),
        ("WatchCalibration", pb.WatchCalibrationRequest(calibration_id="../x")),
    ):
        stub = getattr(service.calibrations, method)
        watching = method.startswith("Watch")
        error = error_of(lambda s=stub, r=request, w=watching: list(s(r)) if w else s(r))
        assert (type(error), error.reason) == (NotFound, "CALIBRATION_NOT_FOUND")


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
    assert len(versions(service)) == 2


@pytest.mark.full
def test_terminated_service_resumes_its_job(service):
    job = service.create("wait-once")
    service.wait_for(job, pb.PHASE_COLLECTING)
    stream = service.calibrations.WatchCalibration(
        pb.WatchCalibrationRequest(calibration_id=job.calibration_id)
    )
    next(stream)
    assert service.terminate() == 0
    assert not service.job_processes()
    with pytest.raises(grpc.RpcError):
        list(stream)
    service.start()
    end = service.end_of(job)
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 1)


def test_process_that_dies_once_is_resumed(service):
    end = service.end_of(service.create("die-once"))
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 1)


@pytest.mark.full
def test_process_that_always_dies_fails_after_three_resumes(service):
    end = service.end_of(service.create("die"))
    assert end.state == pb.STATE_FAILED
    assert end.failure.reason == "JOB_PROCESS_DIED"
    assert "4 times" in end.failure.message
    assert "SIGKILL" in end.failure.message
    assert end.num_resumes == 3


@pytest.mark.full
def test_death_right_after_publishing_publishes_once(service):
    end = service.end_of(service.create("die-publishing"))
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 1)
    (published,) = versions(service)
    assert end.manifest_digest == published.manifest_digest
    # 1: the finished product of the first process was published, not a second one.
    assert '"attempt":1' in get(service, 1).manifest_json


@pytest.mark.full
def test_a_publication_that_cannot_be_recorded_is_recorded_later(start_service):
    service = start_service(
        patch="import calibrator_service.supervisor as s; s.RETRY_INTERVAL_S = 0.1"
    )
    end = service.end_of(service.create("unrecorded-once"))
    assert (end.state, end.num_resumes) == (pb.STATE_SUCCEEDED, 1), end.failure
    (published,) = versions(service)
    assert end.manifest_digest == published.manifest_digest


def get(service: Service, version: int) -> router_pb2.RouterVersion:
    request = router_pb2.GetVersionRequest(model_id="tiny", version=version)
    return service.routers.GetVersion(request).version


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


def test_health_per_service(service):
    assert service.channel is not None
    stub: Any = health_pb2_grpc.HealthStub(service.channel)
    for name in ("", "neap.calibration.v1.CalibrationService", "neap.router.v1.RouterService"):
        wait_until(
            lambda name=name: (
                stub.Check(health_pb2.HealthCheckRequest(service=name)).status
                == health_pb2.HealthCheckResponse.SERVING
            )
        )


def test_unreadable_records_do_not_hide_other_jobs(service):
    """Records as after a downgrade, of a queued and of an ended job, and records with every other damage."""
    blocker = service.create("wait", "blocker")
    service.wait_for(blocker, pb.PHASE_COLLECTING)
    bad = {
        name: service.create("", name).calibration_id
        for name in ("spec", "state", "figures", "aliases", "end_time_s", "fraction")
    }
    good = service.create("", "good")
    service.kill()
    database = service.folder / "calibrator" / "jobs.db"
    for name, value in {
        "spec": '{"model_id": "tiny", "source": {"kind": "Radio"}}',
        "state": "dreaming",
        "figures": "[1]",
        "aliases": "7",
        "end_time_s": 1e30,
        "fraction": "half",
    }.items():
        state = {"state": "succeeded"} if name != "spec" else {}
        rewrite(database, bad[name], **(state | {name: value}))
    service.start()
    cancel = pb.CancelCalibrationRequest(calibration_id=blocker.calibration_id)
    service.calibrations.CancelCalibration(cancel, timeout=60)
    assert service.end_of(good).state == pb.STATE_SUCCEEDED
    listed = service.calibrations.ListCalibrations(pb.ListCalibrationsRequest(), timeout=60)
    assert [job.calibration_id for job in listed.calibrations] == [
        good.calibration_id,
        blocker.calibration_id,
    ]
    assert [job.calibration_id for job in listed.unreadable] == list(reversed(bad.values()))
    assert {job.reason for job in listed.unreadable} == {"JOB_UNREADABLE"}
    states = {job.calibration_id: job.state for job in listed.unreadable}
    assert states[bad["spec"]] == pb.STATE_FAILED, "the queue has ended it and gone on"
    assert states[bad["state"]] == pb.STATE_UNSPECIFIED
    for calibration_id in bad.values():
        job = pb.Calibration(calibration_id=calibration_id)
        for call in (lambda job=job: service.get(job), lambda job=job: list(service.watch(job))):
            error = error_of(call)
            assert (type(error), error.reason) == (Corrupt, "JOB_UNREADABLE")
    page = pb.ListCalibrationsRequest(page_size=2)
    paged = service.calibrations.ListCalibrations(page, timeout=60)
    assert len(paged.calibrations) + len(paged.unreadable) == 2
    assert paged.next_page_token


def health_of(service: Service) -> int:
    assert service.channel is not None
    stub: Any = health_pb2_grpc.HealthStub(service.channel)
    request = health_pb2.HealthCheckRequest(service="neap.calibration.v1.CalibrationService")
    return stub.Check(request, timeout=60).status


def test_a_service_whose_queue_has_died_reports_not_serving(start_service):
    service = start_service(
        *("--model", "tiny=/a", "--grace-s", "60"),
        patch="from calibrator_service.jobs import JobStore; JobStore.claim = lambda store: 1 / 0",
    )
    wait_until(lambda: health_of(service) == health_pb2.HealthCheckResponse.SERVING)
    job = service.create()
    wait_until(lambda: health_of(service) == health_pb2.HealthCheckResponse.NOT_SERVING)
    assert service.terminate() == 1
    service.patch, service.flags = "", ("--model", "tiny=/a")
    service.start()
    assert service.end_of(job).state == pb.STATE_SUCCEEDED


def test_a_job_that_cannot_be_supervised_fails_and_the_queue_continues(start_service):
    service = start_service(
        patch="import subprocess as s\n"
        "real, s.Popen = s.Popen, lambda *_, **__: (setattr(s, 'Popen', real), 1 / 0)"
    )
    end = service.end_of(service.create())
    assert (end.state, end.failure.reason) == (pb.STATE_FAILED, "INTERNAL")
    assert "division" not in end.failure.message
    assert service.end_of(service.create(request_id="next")).state == pb.STATE_SUCCEEDED


def test_extreme_numbers_are_refused_or_returned(start_service):
    """Each number and enum of the requests in turn, in a request that is otherwise valid."""
    service = start_service("--model", "tiny=/a", "--max-queued-jobs", "1000")
    service.wait_for(service.create("wait", "blocker"), pb.PHASE_COLLECTING)
    valid = pb.CalibrationSpec(model_id="tiny", self_generated=pb.SelfGenerated())
    taken, refused = 0, {}
    for number, (what, spec) in enumerate(extremes(valid)):
        request = pb.CreateCalibrationRequest(request_id=f"request-{number}", spec=spec)
        try:
            made = service.calibrations.CreateCalibration(request, timeout=60).calibration
            assert service.get(made) == made, what
            taken += 1
        except grpc.RpcError as error:
            refused[what] = type(from_rpc_error(error))
    assert set(refused.values()) == {InvalidInput}, refused
    assert taken > 5
    every = pb.ListCalibrationsRequest(page_size=1000)
    for what, request in [("all", every), *extremes(pb.ListCalibrationsRequest())]:
        listed = service.calibrations.ListCalibrations(request, timeout=60)
        assert not listed.unreadable, what
    listed = service.calibrations.ListCalibrations(every, timeout=60)
    assert len(listed.calibrations) == taken + 1
