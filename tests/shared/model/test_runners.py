"""An option that does not work on the device is refused, and so is a cache that the runner did not make."""

import pytest
import torch

from shared.errors import PreconditionFailed
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.runners import make_runner
from tests.paged import load_family
from tests.paged import make_runner as make_paged


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"record": True}, "CANNOT_RECORD"),
        ({"compile_layers": True}, "CANNOT_COMPILE"),
    ],
)
def test_a_cpu_refuses_what_only_a_gpu_has(asked: dict[str, bool], reason: str) -> None:
    with pytest.raises(PreconditionFailed) as refused:
        make_runner(load_family("llama"), 1 << 20, **asked)
    assert refused.value.reason == reason


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
