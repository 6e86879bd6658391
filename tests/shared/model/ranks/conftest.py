"""Two ranks for all tests of a module: a process takes seconds to start."""

from collections.abc import Iterator

import pytest

from shared.model.ranks.group import Ranks
from tests.ranks import ranks_of


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(2) as ranks:
        yield ranks
