import platform
from collections.abc import Iterator

import pytest
import torch

from shared import ops
from shared.ops.build import ISAS, WITHIN, build


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    build()  # a no-op unless a source changed
    ops.load()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # most cases are too small for a second one
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        names = ISAS.get(platform.machine(), ("portable",))
        # What stands in another set's object differs from it in these products alone.
        within = [name for name, other in WITHIN.items() if other in names and "rounded" in metafunc.module.__name__]
        metafunc.parametrize("isa", [*names, *within], indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        ops.set_cpu_isa(request.param)
    except RuntimeError:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    ops.set_cpu_isa("auto")
