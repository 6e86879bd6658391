"""Fixtures: a scripted service on loopback and a runner for the command `neap`."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from neap_client.calibration.v1 import calibration_pb2, calibration_pb2_grpc
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc
from neap_client.router.v1 import router_pb2, router_pb2_grpc
from typer.testing import CliRunner, Result

from calibrator_service.convert import version_to_proto
from neap_engine.cli.console import out
from neap_engine.cli.main import app
from shared.errors import InvalidInput, NeapError, NotFound, Unavailable
from shared.registry.base import PublishedVersion
from shared.rpc.status import code_of, to_status, trailing_metadata
from tests.manifests import real_manifest

NUM_LAYERS = 30
MANIFEST = real_manifest()


def refuse(context: Any, error: NeapError) -> None:
    context.set_trailing_metadata(trailing_metadata(to_status(error)))
    context.abort(code_of(error), error.message)


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers every prompt with "Héllo there" and one accepted draft. Records the requests."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.text = " there"
        self.has_chat_template = True
        self.loading = ""
        self.is_interrupted = False
        self.router_version = 0
        # Called with every request; may raise NeapError.
        self.on_generate: Callable[[Any], object] = lambda request: None
        self.load = inference_pb2.Load(num_running=2, num_waiting=1, kv_usage_ratio=0.25)

    def GetModel(self, request: Any, context: Any) -> Any:
        if request.model_id != "tiny":
            refuse(context, NotFound(f"no model {request.model_id!r}", reason="MODEL_NOT_FOUND"))
        return inference_pb2.GetModelResponse(model=self.model())

    def ListModels(self, request: Any, context: Any) -> Any:
        if self.loading:
            refuse(context, Unavailable(self.loading, reason="NOT_READY"))
        return inference_pb2.ListModelsResponse(models=[self.model()])

    def model(self) -> Any:
        return inference_pb2.Model(
            model_id="tiny",
            num_layers=NUM_LAYERS,
            context_length=2048,
            fingerprint="sha256:" + "a" * 64,
            load=self.load,
            routers=[inference_pb2.LoadedRouter(version=version) for version in (3, 7)],
        )

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self.requests.append(request)
        if request.HasField("chat") and not self.has_chat_template:
            refuse(context, InvalidInput("no chat template", reason="NO_CHAT_TEMPLATE"))
        try:
            self.on_generate(request)
        except NeapError as error:
            refuse(context, error)
        exact = request.depth.WhichOneof("policy") != "full"
        response = inference_pb2.GenerateResponse
        started = inference_pb2.Started(request_id="r", model_id="tiny", num_prompt_tokens=3)
        started.policy = request.depth.WhichOneof("policy")
        started.router_version = int(self.router_version) if exact else 0
        started.lossy = started.policy == "relaxed"
        resumed = len(request.resume.token_ids)
        started.num_resumed_tokens, started.continued_inexactly = resumed, bool(resumed)
        yield response(started=started)
        first = inference_pb2.Token(id=1, exit_depth=NUM_LAYERS, proposer="full")
        second = inference_pb2.Token(
            id=2, exit_depth=0 if exact else NUM_LAYERS, proposer="prompt-lookup" if exact else "full"
        )
        if not resumed:
            yield response(chunk=inference_pb2.TokenChunk(text="Héllo", tokens=[first]))
            if self.is_interrupted:
                refuse(context, Unavailable("gone"))
        yield response(chunk=inference_pb2.TokenChunk(text=self.text, tokens=[second]))
        finished = inference_pb2.Finished(
            reason=inference_pb2.FINISH_REASON_LENGTH,
            usage=inference_pb2.Usage(num_prompt_tokens=3, num_completion_tokens=2),
            depth=inference_pb2.DepthStatistics(
                num_drafted=1 if exact else 0,
                num_accepted=1 if exact else 0,
                num_layer_executions=NUM_LAYERS if exact else 2 * NUM_LAYERS,
                mean_layers_per_token=15 if exact else 30,
                num_relaxed=int(started.lossy),
            ),
        )
        finished.timing.decode.FromMilliseconds(50 if exact else 100)
        for token in (first, second):
            finished.depth.exits.add(proposer=token.proposer, depth=token.exit_depth, num_tokens=1)
        yield response(finished=finished)


class FakeCalibration(calibration_pb2_grpc.CalibrationServiceServicer):
    """Has one job, which runs through `states`. Records its spec and whether it was cancelled.

    `on_create` and `on_watch` are called when such a call arrives, before it is answered. A watch waits before the last
    state until `may_end` is set, or the job is cancelled, or the watch is.
    """

    def __init__(self) -> None:
        self.spec: Any = None
        self.cancelled = False
        self.on_create: Callable[[], object] = lambda: None
        self.on_watch: Callable[[], object] = lambda: None
        self.unreadable: list[Any] = []
        self.cancel_error: NeapError | None = None
        self.may_end = threading.Event()
        self.may_end.set()
        self.states = [
            {"state": calibration_pb2.STATE_QUEUED},
            {
                "state": calibration_pb2.STATE_RUNNING,
                "phase": calibration_pb2.PHASE_COLLECTING,
                "fraction": 0.25,
                "figures": {"tokens": 1234.0},
            },
            {
                "state": calibration_pb2.STATE_SUCCEEDED,
                "fraction": 1.0,
                "router_version": 7,
                "manifest_digest": "sha256:abc",
                "figures": {"speed_up": 1.417},
            },
        ]

    def job(self, index: int) -> Any:
        made = calibration_pb2.Calibration(calibration_id="job-1", **self.states[index])
        made.create_time.FromJsonString("2026-11-22T12:00:00Z")
        return made

    def ListCalibrations(self, request: Any, context: Any) -> Any:
        """As many jobs as there are states, one in each, two on a page."""
        first = int(request.page_token or 0)
        last = min(first + 2, len(self.states))
        return calibration_pb2.ListCalibrationsResponse(
            calibrations=[self.job(index) for index in range(first, last)],
            next_page_token=str(last) if last < len(self.states) else "",
            unreadable=[] if first else self.unreadable,
        )

    def CreateCalibration(self, request: Any, context: Any) -> Any:
        self.spec = request.spec
        self.on_create()
        return calibration_pb2.CreateCalibrationResponse(calibration=self.job(0))

    def GetCalibration(self, request: Any, context: Any) -> Any:
        return calibration_pb2.GetCalibrationResponse(calibration=self.job(-1))

    def CancelCalibration(self, request: Any, context: Any) -> Any:
        if self.cancel_error is not None:
            refuse(context, self.cancel_error)
        self.cancelled = True
        self.states[-1] = {"state": calibration_pb2.STATE_CANCELLED}
        self.may_end.set()
        return calibration_pb2.CancelCalibrationResponse(calibration=self.job(1))

    def RetryCalibration(self, request: Any, context: Any) -> Any:
        self.states[-1] = {"state": calibration_pb2.STATE_SUCCEEDED, "router_version": 7}
        return calibration_pb2.RetryCalibrationResponse(calibration=self.job(0))

    def WatchCalibration(self, request: Any, context: Any) -> Iterator[Any]:
        context.add_callback(self.may_end.set)
        self.on_watch()
        for index in range(len(self.states) - 1):
            yield calibration_pb2.WatchCalibrationResponse(calibration=self.job(index))
        self.may_end.wait()
        yield calibration_pb2.WatchCalibrationResponse(calibration=self.job(-1))


class FakeRouters(router_pb2_grpc.RouterServiceServicer):
    """Has the versions 1 and 2. The alias "stable" names version 1."""

    def __init__(self) -> None:
        self.stable = 1
        self.canary: Any = None
        self.requests: list[Any] = []
        self.manifest = MANIFEST
        self.manifests: dict[int, Any] = {}  # of some versions, instead
        self.damage: dict[int, str] = {}
        self.reason = "better"
        self.history: list[Any] | None = []  # oldest first. Empty: two changes; None: no alias

    def version(self, number: int) -> Any:
        published = PublishedVersion(
            "tiny",
            number,
            f"sha256:{number}",
            0.0,
            2_500_000,
            self.manifests.get(number, self.manifest),
            damage=self.damage.get(number, ""),
        )
        return version_to_proto(published, with_manifest=True)

    def ListVersions(self, request: Any, context: Any) -> Any:
        known = [self.version(2), self.version(1)] if request.model_id == "tiny" else []
        return router_pb2.ListVersionsResponse(versions=known)

    def GetVersion(self, request: Any, context: Any) -> Any:
        return router_pb2.GetVersionResponse(version=self.version(request.version or 2))

    def ListAliases(self, request: Any, context: Any) -> Any:
        return router_pb2.ListAliasesResponse(
            aliases=[router_pb2.Alias(name="stable", version=self.stable, canary=self.canary)]
        )

    def SetAlias(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        change = self.change(self.stable, request.version, request.reason)
        self.stable = request.version
        return router_pb2.SetAliasResponse(change=change)

    def SetCanary(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.canary = request.canary if request.HasField("canary") else None
        return router_pb2.SetCanaryResponse(change=self.change(self.stable, self.stable, request.reason))

    def PromoteCanary(self, request: Any, context: Any) -> Any:
        before, self.stable, self.canary = self.stable, self.canary.version, None
        return router_pb2.PromoteCanaryResponse(change=self.change(before, self.stable, request.reason))

    def RollbackAlias(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return router_pb2.RollbackAliasResponse(change=self.change(2, 1, request.reason))

    def BeginTrial(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.canary = router_pb2.Canary(version=request.version, share_per_mille=50)
        return router_pb2.BeginTrialResponse(change=self.change(self.stable, self.stable, request.reason))

    def OrderJudge(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return router_pb2.OrderJudgeResponse()

    def GetJudged(self, request: Any, context: Any) -> Any:
        judged = router_pb2.Judged(
            alias="stable", version=self.stable, canary=self.canary, state="on trial", figures="1.2x as fast\x1b[2J"
        )
        return router_pb2.GetJudgedResponse(aliases=[judged], forbidden_versions=[7, 9])

    def GetAliasHistory(self, request: Any, context: Any) -> Any:
        if self.history is None:
            refuse(context, NotFound("no alias", reason="ALIAS_NOT_FOUND"))
        if self.history:
            return router_pb2.GetAliasHistoryResponse(changes=self.history[::-1])
        first = router_pb2.AliasChange(alias="stable", to_version=1, actor="ada", reason="first")
        return router_pb2.GetAliasHistoryResponse(changes=[self.change(1, 2, self.reason), first])

    def change(self, before: int, after: int, reason: str) -> Any:
        return router_pb2.AliasChange(
            alias="stable", from_version=before, to_version=after, reason=reason, actor="bob", canary=self.canary
        )


class FakeService:
    """Serves all three services at one address."""

    def __init__(self) -> None:
        self.inference = FakeInference()
        self.calibration = FakeCalibration()
        self.routers = FakeRouters()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, self._server)
        calibration_pb2_grpc.add_CalibrationServiceServicer_to_server(self.calibration, self._server)
        router_pb2_grpc.add_RouterServiceServicer_to_server(self.routers, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def service() -> Iterator[FakeService]:
    fake = FakeService()
    yield fake
    fake.stop()


class Neap:
    def __call__(self, *arguments: str, code: int | None = 0, **options: Any) -> Result:
        """Runs a command, which must end with this exit code."""
        result = CliRunner().invoke(app, list(arguments), **options)
        assert code in (None, result.exit_code), result.output
        return result


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal wide enough for any table. Where tests run side by side, COLUMNS was 80 when the console was made,
    which keeps it."""
    monkeypatch.setattr(out, "width", 300)


@pytest.fixture
def measured_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a command may measure: there are prompts.jsonl and a registry."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "registry").mkdir()
    monkeypatch.setenv("NEAP_REGISTRY", str(tmp_path / "registry"))


@pytest.fixture
def neap() -> Neap:
    return Neap()
