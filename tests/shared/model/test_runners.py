"""What was asked for and cannot be had is refused, not left out."""

import pytest

from shared.errors import PreconditionFailed
from shared.model.paged_runner import PagedRunner
from shared.model.runners import make_runner
from tests.paged import load_family


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


def test_a_cpu_serves_the_models_own_way() -> None:
    assert not isinstance(make_runner(load_family("llama"), 1 << 20), PagedRunner)
