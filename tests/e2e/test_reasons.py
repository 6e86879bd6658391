"""Each row of the table of reasons is provoked through all faces of one worker, one gateway and one calibrator."""

import shlex
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc
from neap_client.calibration.v1 import calibration_pb2_grpc
from neap_client.inference.v1 import inference_pb2_grpc
from neap_client.router.v1 import router_pb2_grpc
from typer.testing import CliRunner

from calibrator_service import router_servicer, servicer
from calibrator_service.job_process import JobFolder
from calibrator_service.supervisor import Supervisor
from calibrator_service.watchers import Watchers
from docs.generators.reasons import collect_reasons
from neap_engine.cli.main import app
from shared.blocking import BlockingPool
from shared.calibrator_settings import CalibratorSettings
from shared.engine.engine import Engine
from shared.model.load import load_model
from shared.registry.base import Canary
from shared.registry.factory import open_registry
from shared.rpc.access import Access
from shared.rpc.security import ServerSecurity
from shared.rpc.serving import RpcServer
from tests.e2e.reasons_table import ELSEWHERE, LONG, NO_TEST_NAMES, ROWS, job
from tests.gateways import gateway_to, running
from tests.generation import explained, request_of
from tests.manifests import real_manifest
from tests.server_settings import ServerSettings
from tests.tokens import bearer, write_tokens
from tests.worker import serving

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the rows read, and a registry with what they name."""
    folder = tmp_path_factory.mktemp("reasons")
    (folder / "texts").mkdir()
    (folder / "texts" / "data.bin").write_text("no")
    (folder / "long").write_text(LONG * 64)
    (folder / "prompts").write_text("x\n" * 100_001)
    with closing(open_registry(str(folder / "registry"))) as registry:

        def publish(model_id, name, *aliases, **fields):
            manifest = {**real_manifest(), "number": name, **fields}
            registry.publish(model_id, manifest, {"x": b"weights"}, request_id=model_id + name, aliases=aliases)

        publish("acme", "1", "stable", "tried")
        publish("acme", "2")
        publish("acme", "3", pool="legal")
        publish("acme", "4", checks={"speed": {"passed": False}})
        registry.set_canary("acme", "tried", Canary(2, 5))
        publish("tiny", "1", "latest@legal", pool="legal")
        yield SimpleNamespace(folder=folder, registry=registry)


@pytest.fixture(scope="module")
def calibrator(place, security):
    """Its queue does not run."""
    settings = CalibratorSettings(
        models="tiny=/nowhere,acme=/nowhere",
        data_dir=place.folder,
        text_folders=(place.folder / "texts",),
        hub_datasets=("g/*",),
        max_queued_jobs=1,
    )

    async def make(state: SimpleNamespace) -> None:
        watchers, pool = Watchers(), BlockingPool()
        supervisor = Supervisor(JobFolder(place.folder / "calibrator"), settings)
        state.store = supervisor.store
        server = RpcServer(ServerSettings(), [servicer.SERVICE_NAME, router_servicer.SERVICE_NAME], security=security)
        parts = {"pool": pool, "watchers": watchers}
        jobs = servicer.CalibrationServicer(supervisor, registry=place.registry, registry_pool=pool, **parts)
        calibration_pb2_grpc.add_CalibrationServiceServicer_to_server(jobs, server.grpc_server)
        routers = router_servicer.RouterServicer(place.registry, models=settings.sources, **parts)
        router_pb2_grpc.add_RouterServiceServicer_to_server(routers, server.grpc_server)
        state.target = f"127.0.0.1:{await server.start()}"
        await server.set_serving()
        state.ready.set()
        await state.finish.wait()
        await server.grpc_server.stop(None)
        pool.close()
        supervisor.stop()

    with running(make) as state:
        yield state


@pytest.fixture(scope="module")
def security(place):
    place.tokens = write_tokens(place.folder / "tokens", pools={"all": "*"})
    return ServerSecurity(access=Access(place.folder / "tokens"))


@pytest.fixture(scope="module")
def faces(place, security, calibrator, folder):
    """Stubs, an HTTP client, addresses for the command line, the engine, and the id of a job that waits."""
    options = [("grpc.max_send_message_length", -1)]
    with (
        Engine(load_model(folder, model_id="tiny"), kv_budget_bytes=1 << 19) as engine,
        serving(engine, place.registry, security=security) as worker,
        gateway_to(worker.target, generation_defaults="openai", max_body_mb=1, max_choices=4) as gateway,
        grpc.insecure_channel(worker.target, options=options) as to_worker,
        grpc.insecure_channel(calibrator.target, options=options) as to_calibrator,
    ):
        jobs = calibration_pb2_grpc.CalibrationServiceStub(to_calibrator)
        stubs = (
            inference_pb2_grpc.InferenceServiceStub(to_worker),
            jobs,
            router_pb2_grpc.RouterServiceStub(to_calibrator),
            health_pb2_grpc.HealthStub(to_worker),
        )
        first = jobs.CreateCalibration(job("first"), metadata=bearer(place.tokens["all"])).calibration
        yield SimpleNamespace(
            stubs=stubs, http=gateway.http, engine=engine, worker=worker.target, job=first.calibration_id
        )
        again = jobs.CreateCalibration(job("first"), metadata=bearer(place.tokens["all"])).calibration
        assert again == first, "a full queue still knows it"
        assert [one.calibration_id for one in calibrator.store.list("", before=None, limit=9)] == [first.calibration_id]


def call(faces, request, **options):
    """The method is named after the request."""
    name = type(request).__name__.removesuffix("Request").replace("HealthCheck", "Check")
    method = next(getattr(stub, name) for stub in faces.stubs if hasattr(stub, name))
    answer = method(request, timeout=60, **options)
    return answer if isinstance(answer, Message) else list(answer)


@pytest.mark.parametrize(
    ("statuses", "row"),
    [pytest.param(statuses, row, id=row.reason) for statuses, rows in ROWS.items() for row in rows],
)
def test_each_face_says_the_reason(statuses, row, faces, place, calibrator):
    token = place.tokens.get(row.token, row.token)
    if row.request is not None:
        request = row.request if isinstance(row.request, Message) else request_of(**row.request)
        if getattr(request, "calibration_id", "") == "{job}":
            request = type(request)(calibration_id=faces.job)
        with pytest.raises(grpc.RpcError) as caught:
            call(faces, request, metadata=bearer(token) if token else ())
        code, info, message = explained(caught.value)
        assert (code, info.reason) == (statuses[0], row.reason), message
        assert message
        assert row.says in message
    if row.body is not None:
        reply = post(faces.http, row.body, token)
        error = reply.json()["error"]
        assert (reply.status_code, error["neap"]["reason"]) == (statuses[1], row.reason), reply.text
        assert row.says in error["message"]
    if row.flags is not None:
        words = row.flags if row.flags[:1].isalpha() else f"generate hello {row.flags}"
        command = shlex.split(words.replace("{folder}", str(place.folder)).replace("{job}", faces.job))
        name = 2 if command[0] in ("routers", "jobs") else 1
        defaults = {
            "generate": ("--raw", "--model", "tiny", "--worker", faces.worker),
            "calibrate": ("--detach", "--model", "tiny", "--calibrator", calibrator.target),
            "routers": ("--model", "acme", "--calibrator", calibrator.target),
            "jobs": ("--calibrator", calibrator.target),
        }
        command[name:name] = defaults[command[0]]
        result = CliRunner().invoke(app, command, env={"NEAP_TOKEN": token})
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert f"[{row.reason}" in result.stderr or row.reason == "INVALID_INPUT"
        assert row.says in result.stderr
    assert faces.engine.num_running == faces.engine.num_waiting == 0


def post(http, body, token):
    headers = {"authorization": f"Bearer {token}"} if token else {}
    if isinstance(body, tuple):
        method, path, content = body
        return http.request(method, path, content=content, headers=headers)
    kind, prompt = ("chat/completions", {}) if "messages" in body else ("completions", {"prompt": "hello"})
    return http.post(f"/v1/{kind}", json={"model": "tiny", "temperature": 0, **prompt, **body}, headers=headers)


def test_every_reason_has_a_row_or_is_provoked_by_a_test():
    told = {row.reason for rows in ROWS.values() for row in rows} | set(NO_TEST_NAMES.split())
    for words in ELSEWHERE.values():
        for word in words.split():
            if word.islower():
                text = (TESTS / f"{word}.py").read_text()
            else:
                assert word in text or f'"{word.lower()}"' in text, word
                told.add(word)
    known = [name.replace("…", "*") for name in collect_reasons()]
    assert [name for name in known if not any(fnmatchcase(one, name) for one in told)] == []
    assert [one for one in told if not any(fnmatchcase(one, name) for name in known)] == []
