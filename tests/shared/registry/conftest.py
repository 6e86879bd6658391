"""Backends under test. Redis and S3 join by adding a factory: the contract tests then run on them, too."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.registry.base import Registry
from shared.registry.factory import open_registry

BACKENDS = {"local": lambda folder: open_registry(str(folder / "registry"))}


@pytest.fixture(params=sorted(BACKENDS))
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Registry]]:
    """Each call is another client of the same registry."""
    opened: list[Registry] = []

    def open_one() -> Registry:
        opened.append(BACKENDS[request.param](tmp_path))
        return opened[-1]

    yield open_one
    for registry in opened:
        registry.close()


@pytest.fixture
def registry(open_again: Callable[[], Registry]) -> Registry:
    return open_again()
