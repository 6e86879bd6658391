"""Fixtures: a Redis and an S3 for all tests together, and ones of a test's own, to kill. tests/conftest.py offers them
to all."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from tests.servers import S3_ENVIRONMENT, RedisCluster, RedisServer, S3Server, redis_programs

# The oldest there is, and Valkey as a cluster. The dev extra brings them.
SERVERS = [*list(redis_programs())[:1], "cluster"]
# What a registry's step hook is told during a publication into a bucket with Redis.
PUBLICATION_STEPS = [
    f"{step}:{kind}" for kind in ("blobs", "manifests") for step in ("write", "written", "verified")
] + ["claimed", "journal:begin", "journal:written", "index:advanced"]


class Steps:
    """A step hook that calls a function once."""

    def __init__(self) -> None:
        self._wanted, self._then = "", lambda: None

    def at(self, wanted: str, then: Callable[[], object]) -> None:
        self._wanted, self._then = wanted, then

    def __call__(self, name: str) -> None:
        if name == self._wanted:
            self._wanted = ""
            self._then()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in S3_ENVIRONMENT.items():
            patch.setenv(name, value)
        stack.callback(server.kill)
        server.start()
        yield server


@pytest.fixture(scope="session")
def start_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisServer]]:
    """The server of that name, started at its first use."""
    started: dict[str, RedisServer] = {}

    def start(name: str) -> RedisServer:
        if name not in started:
            programs, folder = redis_programs(), tmp_path_factory.mktemp(name)
            if name == "cluster":
                started[name] = RedisCluster(folder, programs["valkey-9"])
            else:
                started[name] = RedisServer(folder, programs[name])
            started[name].start()
        return started[name]

    yield start
    for server in started.values():
        server.kill()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One that the test may kill."""
    with RedisServer(tmp_path / "redis", redis_programs()["valkey-9"]).running() as server:
        yield server


@pytest.fixture
def own_s3(tmp_path: Path, s3: S3Server) -> Iterator[S3Server]:
    """One that the test may kill."""
    with S3Server(tmp_path / "s3").running() as server:
        yield server


def bucket_url(s3: S3Server) -> str:
    """The URL of a new registry without Redis."""
    return f"s3://neap/{uuid.uuid4().hex}?endpoint={s3.endpoint}"


def shared_url(server: RedisServer, s3: S3Server, prefix: str = "") -> str:
    """The URL of a new registry, unless `prefix` names one."""
    scheme = "redis+cluster" if isinstance(server, RedisCluster) else "redis"
    objects = f"s3://neap/{prefix or uuid.uuid4().hex}"
    return f"{scheme}://127.0.0.1:{server.port}?objects={objects}&endpoint={s3.endpoint}"


def new_place(kind: str, request: pytest.FixtureRequest) -> str:
    """The path or URL of a new registry: "folder", "bucket", or one of SERVERS for a bucket with an index in it."""
    if kind == "folder":
        return str(request.getfixturevalue("tmp_path") / "registry")
    s3 = request.getfixturevalue("s3")
    if kind == "bucket":
        return bucket_url(s3)
    server = request.getfixturevalue("start_redis")(kind)
    with server.client() as client:
        client.flushall()
    return shared_url(server, s3)


@contextmanager
def shared_registry(url: str) -> Iterator[Registry]:
    """Opened by its URL, as the services do."""
    with closing(open_registry(url)) as registry:
        yield registry
