"""What a worker refuses to start with."""

import pytest

from inference_service.__main__ import _load_engine
from shared import configured_model, ops
from shared.errors import PreconditionFailed
from shared.model.loaded import wrap_model
from shared.service_settings import ModelSource, WorkerSettings
from tests.families import build_family
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


def test_kernels_are_those_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured_model, "load_model", lambda *_, **__: ops.cpu_isa())
    try:
        wanted = WorkerSettings(cpu_path="portable")
        assert configured_model.load_configured(SOURCE, wanted) == "portable"
    finally:
        ops.set_cpu_isa("auto")
    with raises(PreconditionFailed, "CPU_PATH_MISSING", match="no CPU kernels mmx"):
        configured_model.use_cpu_path("mmx")
