"""A large model answers before its fingerprint is known. What names it waits, and no answer changes."""

from contextlib import closing
from pathlib import Path

import grpc
import pytest
import structlog
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service.__main__ import _complete, _load_engine
from shared.engine.engine import Engine
from shared.model import load
from shared.model.load import load_model
from shared.model.remembered.store import StartStore
from shared.registry.factory import open_registry
from shared.service_settings import ModelSource
from shared.worker_settings import WorkerSettings
from tests.generation import EXACT, answer, publish, refused, request_of
from tests.gguf_files import write_llama
from tests.worker import serving


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(load, "is_large", lambda _: True)
    return write_llama(tmp_path / "tiny.gguf")


def test_routers_and_names_wait_and_answers_do_not(tmp_path: Path, file: Path) -> None:
    twin, loaded = (load_model(file, model_id="tiny") for _ in range(2))
    request = request_of(12, depth=EXACT, token_ids=pb.TokenIds(ids=[1, 2, 3, 1, 2]))
    with closing(open_registry(str(tmp_path / "registry"))) as registry, Engine(loaded) as engine:
        with Engine(twin) as other:
            publish(registry, other)
        with serving(engine, registry) as worker, grpc.insecure_channel(worker.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            early, tokens, _, _ = answer(stub, request)
            assert (early.numerics_id, early.router_version) == ("", 0)
            assert stub.ListModels(pb.ListModelsRequest()).models[0].fingerprint == ""
            resumed = pb.GenerateRequest()
            resumed.CopyFrom(request)
            ids = [token.id for token in tokens]
            resumed.resume.CopyFrom(pb.Resume(token_ids=ids[:5], numerics_id="another", only_exactly=True))
            asked = stub.GetModel.future(pb.GetModelRequest(model_id="tiny"), timeout=60)
            pinned = request_of(12, depth=EXACT, token_ids=request.token_ids, router=pb.RouterSelector(version=1))
            assert [token.id for token in answer(stub, request)[1]] == ids
            assert not asked.done()
            assert not loaded.identity.is_known
            assert answer(stub, pinned)[0].router_version == 1  # who needs it finds it out
            assert asked.result().model.fingerprint == twin.fingerprint
            assert refused(stub, resumed)[1].reason == "NUMERICS_DIFFER"
            late, again, _, _ = answer(stub, request)
            assert (late.numerics_id, late.router_version) == (engine.numerics.id, 1)
            assert [token.id for token in again] == ids


def test_a_start_is_complete_once_the_model_is_identified(tmp_path: Path, file: Path) -> None:
    source, settings = ModelSource("tiny", str(file)), WorkerSettings(data_dir=tmp_path / "data", kv_budget_mb=16)
    identified: list[bool] = []
    with _load_engine(source, settings, print, print) as engine:
        assert not engine.loaded.identity.is_known
        _complete([engine], lambda: identified.append(engine.loaded.identity.is_known))
    assert identified == [True]
    later = load_model(file, store=StartStore(tmp_path / "data" / "start-cache", 1 << 30))
    assert later.identity.is_known
    assert later.fingerprint == load_model(file, accelerate=False).fingerprint


def test_a_worker_whose_files_change_before_that_ends(tmp_path: Path, file: Path) -> None:
    source, settings = ModelSource("tiny", str(file)), WorkerSettings(data_dir=tmp_path / "data", kv_budget_mb=16)
    failures: list[str] = []
    with _load_engine(source, settings, print, print) as engine, structlog.testing.capture_logs() as logs:
        file.write_bytes(file.read_bytes())
        _complete([engine], lambda: failures.append("identified"), lambda: failures.append("failed"))
    assert failures == ["failed"]
    assert "not identified" in logs[-1]["event"]
    assert not load_model(file, store=StartStore(tmp_path / "data" / "start-cache", 1 << 30)).facts.earlier


def test_a_worker_that_ends_gives_it_up(tmp_path: Path, file: Path) -> None:
    source, settings = ModelSource("tiny", str(file)), WorkerSettings(data_dir=tmp_path / "data", kv_budget_mb=16)
    with _load_engine(source, settings, print, print) as engine, structlog.testing.capture_logs() as logs:
        engine.loaded.identity.give_up()
        _complete([engine])
    assert not engine.loaded.identity.is_known
    assert logs == []
