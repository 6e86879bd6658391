"""Which requests for calibrations are refused, by a real service process."""

from collections.abc import Iterator

import grpc
import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.status import from_rpc_error

from calibrator_service.calibration.spec import AnswerFile, TextFile
from calibrator_service.sources import allowed_source
from shared.calibrator_settings import CalibratorSettings
from shared.errors import InvalidInput, NotFound
from shared.registry.names import only_model
from tests.calibrator_service.conftest import Service, error_of
from tests.fuzzing import extremes
from tests.reasons import raises


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
    with raises(InvalidInput, "MODEL_REQUIRED", match="has: none"):
        only_model("", ())


def test_text_files_must_be_in_an_allowed_folder(service):
    allowed, secret = service.folder / "texts", service.folder / "secret.txt"
    secret.write_text("secret")
    (allowed / "link.txt").symlink_to(secret)
    (allowed / "good.txt").write_text("good")

    def create(path: str) -> pb.Calibration:
        return service.create(text_file=pb.TextFile(path=path), request_id=path[:99])

    for path in (
        str(secret),
        "../secret.txt",
        f"{allowed}/../secret.txt",
        str(allowed / "link.txt"),
        "/no/such/file.txt",
    ):
        error = error_of(lambda path=path: create(path))
        assert (type(error), error.reason) == (InvalidInput, "PATH_NOT_ALLOWED"), path
    long_name = error_of(lambda: service.create(text_file=pb.TextFile(path="x" * 5000 + ".txt")))
    assert long_name.reason == "BAD_TEXT_FILE"
    for path in ("good.txt", str(allowed / "good.txt")):
        assert create(path).spec.text_file.path == path


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
