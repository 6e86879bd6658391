"""Which requests for calibrations are refused, by a real service process."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.status import from_rpc_error

from calibrator_service.calibration.spec import AnswerFile, TextFile
from calibrator_service.sources import allowed_source
from shared.errors import InvalidInput, NotFound, PreconditionFailed
from shared.registry.names import only_model
from shared.service_settings import CalibratorSettings
from tests.calibrator_service.conftest import Service, error_of
from tests.fuzzing import extremes

BAD_SPECS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown model": ({"model_id": "unknown"}, NotFound, "MODEL_NOT_FOUND"),
    "bad model id": ({"model_id": "../tiny"}, InvalidInput, "BAD_MODEL_ID"),
    "bad alias": ({"aliases": ["No Way"]}, InvalidInput, "BAD_ALIAS"),
    "too large": ({"self_generated": pb.SelfGenerated(prompts=["x" * 1_000_000] * 9)}, InvalidInput, "SPEC_TOO_LARGE"),
    "too many": ({"self_generated": pb.SelfGenerated(prompts=["x"] * 100_001)}, InvalidInput, "SPEC_TOO_LARGE"),
    "too many aliases": ({"aliases": ["latest"] * 17}, InvalidInput, "BAD_SPEC"),
    "workers, but none are configured": (
        {"self_generated": pb.SelfGenerated(use_workers=True)},
        PreconditionFailed,
        "NO_TEXT_WORKERS",
    ),
    "unknown label": ({"label": 77}, InvalidInput, "BAD_SPEC"),
    "no time": ({"time_budget": Duration(seconds=0)}, InvalidInput, "BAD_SPEC"),
    "negative time": ({"time_budget": Duration(seconds=-5)}, InvalidInput, "BAD_SPEC"),
    "longest time": ({"time_budget": Duration(seconds=2**63 - 1)}, InvalidInput, "BAD_SPEC"),
    "over a week": ({"time_budget": Duration(seconds=604_801)}, InvalidInput, "BAD_SPEC"),
    "nanos out of range": ({"time_budget": Duration(nanos=10**9)}, InvalidInput, "BAD_SPEC"),
    "mixed signs": ({"time_budget": Duration(seconds=5, nanos=-1)}, InvalidInput, "BAD_SPEC"),
    "a parent without a name": ({"parent": pb.ParentRouter()}, InvalidInput, "BAD_ALIAS"),
    "a parent that is not there": ({"parent": pb.ParentRouter(version=9)}, NotFound, "ROUTER_VERSION_NOT_FOUND"),
    "an alias that is not there": ({"parent": pb.ParentRouter(alias="stable")}, NotFound, "ALIAS_NOT_FOUND"),
    "a negative version": ({"parent": pb.ParentRouter(version=-1)}, InvalidInput, "BAD_SPEC"),
    "a share of nothing": ({"parent": pb.ParentRouter(version=1, share=0.0)}, InvalidInput, "BAD_SPEC"),
    "a share above all": ({"parent": pb.ParentRouter(version=1, share=1.01)}, InvalidInput, "BAD_SPEC"),
    "a share that is no number": ({"parent": pb.ParentRouter(version=1, share=float("nan"))}, InvalidInput, "BAD_SPEC"),
    "no digest": ({"parent": pb.ParentRouter(version=1, manifest_digest="sha256:1")}, InvalidInput, "BAD_SPEC"),
    "control characters": ({"hub_dataset": pb.HubDataset(name="a\x1b[2J")}, InvalidInput, "BAD_SPEC"),
    "a long field": ({"text_file": pb.TextFile(path="a", field="x" * 1001)}, InvalidInput, "BAD_TEXT_FILE"),
    "a line in a path": ({"answer_file": pb.AnswerFile(path="a\u2028.jsonl")}, InvalidInput, "BAD_TEXT_FILE"),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With room for many jobs, of which it runs only the first, which waits."""
    folder = tmp_path_factory.mktemp("requests")
    (folder / "texts").mkdir()
    flags = ("--text-folder", str(folder / "texts"), "--hub-dataset", "good/*")
    made = Service(folder, "--model", "tiny=/nowhere", "--max-queued-jobs", "1000", *flags)
    made.wait_for(made.create("wait", "blocker"), pb.PHASE_COLLECTING)
    yield made
    made.terminate()


def num_jobs(service: Service) -> int:
    every = pb.ListCalibrationsRequest(page_size=1000)
    return len(service.calibrations.ListCalibrations(every, timeout=60).calibrations)


def test_a_model_need_not_be_named_where_there_is_one(service):
    assert service.create(model_id="", request_id="without a model").spec.model_id == "tiny"
    for models in ((), ("a", "b")):
        assert only_model("c", models) == "c"
        with pytest.raises(InvalidInput) as caught:
            only_model("", models)
        assert (caught.value.reason, caught.value.metadata["models"]) == (
            "MODEL_REQUIRED",
            ", ".join(models) or "none",
        )


def test_bad_specs_are_refused_at_once(service):
    before = num_jobs(service)
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
        (pb.CreateCalibrationRequest(request_id="x", spec=pb.CalibrationSpec(model_id="tiny")), "SOURCE_REQUIRED"),
    ):
        error = error_of(lambda r=request: service.calibrations.CreateCalibration(r, timeout=60))
        assert (type(error), error.reason) == (InvalidInput, reason)
    assert num_jobs(service) == before


def test_text_files_must_be_in_an_allowed_folder(service):
    allowed, secret = service.folder / "texts", service.folder / "secret.txt"
    secret.write_text("secret")
    (allowed / "link.txt").symlink_to(secret)
    (allowed / "data.bin").write_text("no")
    (allowed / "good.txt").write_text("good")

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


def test_datasets_must_be_on_the_hub_and_allowed(service):
    before = num_jobs(service)

    def refused(request_id: str, **hub: str) -> tuple[type[Exception], str]:
        error = error_of(lambda: service.create(hub_dataset=pb.HubDataset(**hub), request_id=request_id))
        return type(error), error.reason

    for name in (str(service.folder), "./data", "~/data", "hf://datasets/good/a", "text", "good/a/b"):
        assert refused(name, name=name) == (InvalidInput, "BAD_DATASET_NAME")
    assert refused("1", name="other/set") == (InvalidInput, "DATASET_NOT_ALLOWED")
    assert refused("2", name="good/a", split="train[:1%]") == (InvalidInput, "BAD_DATASET_SPLIT")
    assert num_jobs(service) == before
    hub = pb.HubDataset(name="good/a", config="b", split="dev", field="c")
    assert service.create(request_id="3", hub_dataset=hub).spec.hub_dataset == hub


def test_text_files_need_a_folder():
    for source in (TextFile("/etc/hosts.txt"), AnswerFile("/etc/hosts.jsonl")):
        with pytest.raises(InvalidInput, match="--text-folder") as raised:
            allowed_source(source, CalibratorSettings())
        assert raised.value.reason == "PATH_NOT_ALLOWED"


def test_extreme_numbers_are_refused_or_returned(service):
    """Each number and enum of the requests in turn, in a request that is otherwise valid."""
    before = num_jobs(service)
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
    # A parent with a number that no version has.
    missing = {refused.pop(what) for what in list(refused) if what.startswith("parent.version=")}
    assert missing <= {InvalidInput, NotFound}
    assert set(refused.values()) == {InvalidInput}, refused
    assert taken > 5
    every = pb.ListCalibrationsRequest(page_size=1000)
    for what, request in [("all", every), *extremes(pb.ListCalibrationsRequest())]:
        if request.page_size < 0:
            error = error_of(lambda own=request: service.calibrations.ListCalibrations(own))
            assert (type(error), error.reason) == (InvalidInput, "BAD_PAGE_SIZE"), what
            continue
        listed = service.calibrations.ListCalibrations(request, timeout=60)
        assert not listed.unreadable, what
    assert num_jobs(service) == before + taken
