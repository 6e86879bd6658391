"""The scripted service of the tests of the command line, and answers with given speeds."""

import pytest

from demo.answers import Measured, Pair
from tests.neap_engine.cli.conftest import service, wide

__all__ = ["service", "wide"]


def measured(version: int, tokens_per_s: float, ended_s: float = 0.0, num_tokens: int = 31) -> Measured:
    return Measured(version, tuple(range(num_tokens)), 5, (num_tokens - 1) / tokens_per_s, 15, ended_s)


@pytest.fixture
def pairs() -> list[Pair]:
    """Without a router 1.2x and 1.8x, with router 2 3x, and an answer that is too short to have a speed."""
    found = [Pair(measured(0, 10.0, at_s), measured(0, speed, at_s + 1)) for at_s, speed in ((12, 12.0), (14, 18.0))]
    return [*found, Pair(measured(0, 10.0, 31), measured(2, 30.0, 32))]
