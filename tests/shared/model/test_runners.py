"""An option that does not work on the device is refused, and so is a cache that the runner did not make."""

from types import SimpleNamespace

import pytest
import torch

from shared.errors import PreconditionFailed
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import NoRecorder
from shared.model.runners import LayerCompiler, check_runner, make_runner
from shared.ops import cards
from tests.paged import load_family
from tests.paged import make_runner as make_paged
from tests.reasons import raises
from tests.recorders import NotRecordable, TracingRecorder


@pytest.mark.parametrize(
    ("asked", "reason"), [({"record": True}, "CANNOT_RECORD"), ({"compile_layers": True}, "CANNOT_COMPILE")]
)
def test_a_cpu_refuses_what_only_a_gpu_has(asked: dict[str, bool], reason: str) -> None:
    with raises(PreconditionFailed, reason) as refused:
        make_runner(load_family("llama"), 1 << 20, **asked)
    assert "only a GPU" in refused.value.message


def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would serve one request at a time."""
    on_gpu = SimpleNamespace(ranks=None, device=torch.device("cuda"), model_id="tiny")
    monkeypatch.setattr(cards, "cuda_build", lambda: None)
    with raises(PreconditionFailed, "OPS_NOT_BUILT", match="make build-ops"):
        make_runner(on_gpu, 1 << 20)  # type: ignore[arg-type]


def test_a_compiler_that_is_missing_is_named_as_the_reason() -> None:
    """As torch.compile fails in an image without a C compiler."""

    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    torch._dynamo.reset()
    runner = PagedRunner(
        load_family("llama"), kv_budget_bytes=1 << 20, recorder=NoRecorder(), transform=LayerCompiler(no_compiler)
    )
    assert not runner.compiles
    check_runner(runner, record=False, compile_layers=False)
    with raises(PreconditionFailed, "CANNOT_COMPILE", match="Failed to find C compiler"):
        check_runner(runner, record=False, compile_layers=True)


def test_passes_that_cannot_be_recorded_are_refused_with_the_reason() -> None:
    class Failing(TracingRecorder):
        def record(self, work):
            raise NotRecordable("the driver is out of memory")

    runner = PagedRunner(load_family("llama"), kv_budget_bytes=1 << 20, recorder=Failing())
    with raises(PreconditionFailed, "CANNOT_RECORD", match="the driver is out of memory"):
        check_runner(runner, record=True, compile_layers=False)


def test_a_cpu_runs_the_models_own_forward() -> None:
    runner = make_runner(load_family("llama"), 1 << 20)
    assert isinstance(runner, ContiguousRunner)
    assert not runner.records
    assert not runner.compiles


def test_a_cache_of_another_runner_is_refused() -> None:
    contiguous, paged = ContiguousRunner(load_family("llama")), make_paged(load_family("llama"))
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for runner, other in ((contiguous, paged), (paged, contiguous)):
        with pytest.raises(TypeError, match="Cache, not a"):
            runner.run(ids, other.new_cache(1), first=0, last=1, base=0)
        with pytest.raises(TypeError, match="Cache, not a"):
            runner.new_cache(1).copy(other.new_cache(1), 0, 1)
