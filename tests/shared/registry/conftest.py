"""Fixtures for the registries under test: in a folder, in a bucket of a real S3 server, and with an index in each
available Redis."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.registry.address import RegistryAddress
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from tests.registry_damage import bucket_of, damaged
from tests.registry_damage import harm as harm_object
from tests.registry_servers import SERVERS, new_place, shared_url
from tests.servers import RedisServer, S3Server

# (path below the registry's root, "flip" | "truncate" | "delete")
Harm = Callable[[str, str], None]


@pytest.fixture(params=["folder", "bucket", *SERVERS])
def place(request: pytest.FixtureRequest) -> str:
    """The path or URL of a new registry."""
    return new_place(request.param, request)


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
        bucket = bucket_of(request.getfixturevalue("s3"), RegistryAddress.parse(place).prefix)
        harm_object(bucket, path, damage)

    return in_bucket if "://" in place else in_folder


@pytest.fixture
def redis_server(start_redis: Callable[[str], RedisServer]) -> RedisServer:
    """The first of the servers, emptied."""
    server = start_redis(SERVERS[0])
    with server.client() as client:
        client.flushall()
    return server


@pytest.fixture
def url(redis_server: RedisServer, s3: S3Server) -> str:
    """A new registry in a bucket with an index in this server."""
    return shared_url(redis_server, s3)


@pytest.fixture
def registry(open_again: Callable[[], Registry]) -> Registry:
    return open_again()
