"""What `make test` asks of many like cases; `make test-full` asks all others, too."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def tiered(cases: Iterable[Any], usual: Collection[Any]) -> list[ParameterSet]:
    """Parameters of a test: the cases that are not in `usual` are of the full tier. A tuple is several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in usual else pytest.mark.full)
        for case in cases
    ]
