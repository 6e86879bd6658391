"""Caches whose positions are NaN until they are written, as memory that is not filled may be: a pass that reads one
shows it."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from shared.model.cache import ContiguousCache


@pytest.fixture(scope="session", autouse=True)
def unwritten_positions_are_nan() -> Iterator[None]:
    allocate = ContiguousCache._allocate

    def filled(cache: ContiguousCache, like: Tensor) -> Tensor:
        return allocate(cache, like).fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContiguousCache, "_allocate", filled)
        yield
