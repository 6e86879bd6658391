"""Fixtures for the backends under test: the embedded registry, and the shared one over each available Redis and a real S3 server."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.registry.address import SharedAddress
from shared.registry.base import Registry
from shared.registry.factory import open_registry
from tests.registry_damage import bucket_of, damaged
from tests.registry_damage import harm as harm_object
from tests.registry_servers import SERVERS, shared_url
from tests.servers import RedisServer

# (path below the registry's root, "flip" | "truncate" | "delete")
Harm = Callable[[str, str], None]


@pytest.fixture(params=["local", *SERVERS])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, start_redis: Callable[[str], RedisServer]
) -> str:
    """The path or URL of a new registry."""
    if request.param == "local":
        return str(tmp_path / "registry")
    server = start_redis(request.param)
    with server.client() as client:
        client.flushall()
    return shared_url(server, request.getfixturevalue("s3"))


@pytest.fixture
def open_again(place: str) -> Iterator[Callable[[], Registry]]:
    """A function that opens another client of the same registry at each call."""
    opened: list[Registry] = []

    def open_one() -> Registry:
        opened.append(open_registry(place))
        return opened[-1]

    yield open_one
    for registry in opened:
        registry.close()


@pytest.fixture
def harm(place: str, request: pytest.FixtureRequest) -> Harm:
    """A function that damages a stored object: it changes a byte, truncates the object or deletes it."""

    def in_folder(path: str, damage: str) -> None:
        file = Path(place) / path
        if damage == "delete":
            file.unlink()
        else:
            file.write_bytes(damaged(file.read_bytes(), damage))

    def in_bucket(path: str, damage: str) -> None:
        bucket = bucket_of(request.getfixturevalue("s3"), SharedAddress.parse(place).prefix)
        harm_object(bucket, path, damage)

    return in_bucket if "://" in place else in_folder


@pytest.fixture
def url(start_redis, s3) -> str:
    """An empty shared registry over the first of the servers."""
    server = start_redis(SERVERS[0])
    with server.client() as client:
        client.flushall()
    return shared_url(server, s3)


@pytest.fixture
def registry(open_again: Callable[[], Registry]) -> Registry:
    return open_again()
