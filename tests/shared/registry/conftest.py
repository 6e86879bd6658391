"""Backends under test: the embedded registry, and the shared one over each Redis there is, with a real S3 behind it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.registry.base import Registry
from shared.registry.factory import open_registry
from tests.registry_servers import SERVERS, shared_url
from tests.servers import RedisServer


@pytest.fixture(params=["local", *SERVERS])
def open_again(
    request: pytest.FixtureRequest, tmp_path: Path, start_redis: Callable[[str], RedisServer]
) -> Iterator[Callable[[], Registry]]:
    """Each call is another client of the same registry."""
    opened: list[Registry] = []
    if request.param == "local":
        name = str(tmp_path / "registry")
    else:
        server = start_redis(request.param)
        with server.client() as client:
            client.flushall()
        name = shared_url(server, request.getfixturevalue("s3"))

    def open_one() -> Registry:
        opened.append(open_registry(name))
        return opened[-1]

    yield open_one
    for registry in opened:
        registry.close()


@pytest.fixture
def url(start_redis, s3) -> str:
    """A shared registry over the first of the servers, empty."""
    server = start_redis(SERVERS[0])
    with server.client() as client:
        client.flushall()
    return shared_url(server, s3)


@pytest.fixture
def registry(open_again: Callable[[], Registry]) -> Registry:
    return open_again()
