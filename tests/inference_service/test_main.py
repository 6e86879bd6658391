"""What a worker refuses to start with."""

import asyncio
import gc
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from inference_service.__main__ import _complete, _dialect, _load_engine, serve
from inference_service.servicer import InferenceServicer
from shared import configured_model, ops
from shared.compile_cache import VARIABLES
from shared.errors import InvalidInput, PreconditionFailed
from shared.model.load import load_model
from shared.model.loaded import wrap_model
from shared.model.remembered.store import StartStore
from shared.ops import cards
from shared.service_settings import ModelSource
from shared.worker_settings import WorkerSettings
from tests.families import build_family
from tests.gguf_files import write_llama
from tests.reasons import raises

SOURCE = ModelSource("tiny", "folder")


@pytest.mark.parametrize("accelerate", [False, True])
def test_a_worker_that_requires_the_promise_does_not_start_without_it(
    monkeypatch: pytest.MonkeyPatch, accelerate: bool
) -> None:
    loaded = wrap_model(build_family("llama"), accelerate=accelerate, model_id="tiny")
    monkeypatch.setattr("inference_service.__main__.load_configured", lambda *_: loaded)
    settings = WorkerSettings(require_exact=True, kv_budget_mb=16)
    if accelerate:
        with _load_engine(SOURCE, settings, lambda: None, print) as engine:
            assert engine.numerics.is_exact
        return
    with raises(PreconditionFailed, "EXACT_NOT_PROMISED", match="runs its own modules"):
        _load_engine(SOURCE, settings, lambda: None, print)
    with _load_engine(SOURCE, WorkerSettings(kv_budget_mb=16), lambda: None, print) as engine:
        assert not engine.numerics.is_exact


def test_a_first_start_serves_before_it_is_complete_and_answers_stay_the_same(tmp_path: Path) -> None:
    source = ModelSource("tiny", str(write_llama(tmp_path / "tiny.gguf")))
    settings = WorkerSettings(data_dir=tmp_path / "data", kv_budget_mb=16)
    answers, costs = [], []
    for _ in range(2):
        with _load_engine(source, settings, lambda: None, print) as engine:
            begun = engine.generate([1, 2, 3, 1, 2], max_tokens=8, ignore_eos=True).token_ids
            known = dict(engine.loaded.facts.earlier)
            _complete([engine])
            answers += [begun, engine.generate([1, 2, 3, 1, 2], max_tokens=8, ignore_eos=True).token_ids]
            costs.append([name for name in known if name.startswith("costs")])
    assert answers == [answers[0]] * 4
    assert costs == [[], ["costs, 128"]]


def test_what_follows_a_start_ends_with_the_engine(tmp_path: Path) -> None:
    source = ModelSource("tiny", str(write_llama(tmp_path / "tiny.gguf")))
    with _load_engine(source, WorkerSettings(data_dir=tmp_path / "data", kv_budget_mb=16), print, print) as engine:
        pass
    with structlog.testing.capture_logs() as logs:
        _complete([engine])
    assert logs[-1]["event"] == "the start is complete"
    known = load_model(source.source, store=StartStore(tmp_path / "data" / "start-cache", 1 << 30)).facts.earlier
    assert "fingerprint" in known
    assert not any(name.startswith("costs") for name in known)


def test_garbage_is_collected_once_the_models_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collects, set_ready = [], InferenceServicer.set_ready

    def note_and_stop(servicer: InferenceServicer) -> None:
        set_ready(servicer)
        collects.append(gc.isenabled())
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(InferenceServicer, "set_ready", note_and_stop)
    model = ModelSource("tiny", str(write_llama(tmp_path / "tiny.gguf")))
    settings = WorkerSettings(
        models=[model], data_dir=tmp_path / "data", registry=str(tmp_path), listen="127.0.0.1:0", kv_budget_mb=16
    )
    gc.disable()  # as the process does while it imports
    try:
        assert asyncio.run(serve(settings)) == 0
    finally:
        gc.enable()
    assert collects == [True]


def test_kernels_are_those_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured_model, "load_model", lambda *_, **__: ops.cpu_isa())
    try:
        wanted = WorkerSettings(cpu_path="portable")
        assert configured_model.load_configured(SOURCE, wanted) == "portable"
    finally:
        ops.set_cpu_isa("auto")
    with raises(PreconditionFailed, "CPU_PATH_MISSING", match="no CPU kernels mmx"):
        configured_model.use_cpu_path("mmx")


@pytest.mark.parametrize("is_there", [False, True])
def test_a_gpu_that_cannot_serve_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    """Not after minutes of loading, and not by serving one request at a time."""
    source = ModelSource("tiny", str(write_llama(tmp_path / "tiny.gguf")))
    settings = WorkerSettings(models=(source,), device="cuda:1", data_dir=tmp_path / "data")
    monkeypatch.setattr("inference_service.__main__.open_registry", lambda *_: pytest.fail("it goes on"))
    monkeypatch.setattr(cards, "cuda_build", lambda: None)
    for name in VARIABLES:
        monkeypatch.setenv(name, "elsewhere")
    if is_there:
        monkeypatch.setattr(torch, "empty", lambda *_, device: None)
        with raises(PreconditionFailed, "OPS_NOT_BUILT", match="NEAP_BUILD_CUDA=1 make build-ops"):
            asyncio.run(serve(settings))
    else:
        with raises(PreconditionFailed, "DEVICE_UNAVAILABLE", match="cuda:1 cannot be used"):
            asyncio.run(serve(settings))


@pytest.mark.parametrize(
    ("num_models", "given", "budget"),
    [
        (1, {}, 7000),
        (1, {"gpu_memory_share": 0.5}, 3000),
        (1, {"gpu_memory_share": 0.1}, 0),
        (2, {}, None),
        (1, {"kv_budget_mb": 1}, 1 << 20),
    ],
)
def test_a_single_model_gets_the_gpu(
    monkeypatch: pytest.MonkeyPatch, num_models: int, given: dict[str, Any], budget: int | None
) -> None:
    asked: dict[str, Any] = {}

    def engine(_: object, **options: Any) -> None:
        asked.update(options)
        raise PreconditionFailed("far enough", reason="STOP")

    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr("inference_service.__main__.load_configured", lambda *_: on_gpu)
    monkeypatch.setattr("inference_service.__main__.Engine", engine)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8000, 10_000))
    models = tuple(ModelSource(f"model-{number}", "folder") for number in range(num_models))
    with raises(PreconditionFailed, "STOP"):
        _load_engine(SOURCE, WorkerSettings(models=models, **given), print, print)
    assert (asked["kv_budget_bytes"], asked["max_running"]) == (budget, None)


def test_the_dialect_needs_one_model_and_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _dialect(WorkerSettings(models=(SOURCE,))) is None
    with raises(InvalidInput, "BAD_CONFIGURATION", match="exactly one --model"):
        _dialect(WorkerSettings(models=(SOURCE, ModelSource("two", "folder")), vllm_dialect=True))
    wanted = WorkerSettings(models=(SOURCE,), vllm_dialect=True)
    served = _dialect(wanted)
    assert served is not None
    assert served.SERVICE_NAME == "vllm.grpc.engine.VllmEngine"
    monkeypatch.delitem(sys.modules, "inference_service.vllm_servicer")
    monkeypatch.setitem(sys.modules, "smg_grpc_proto.generated", None)
    with raises(InvalidInput, "BAD_CONFIGURATION", match="neap-server"):
        _dialect(wanted)
