"""Publishes or sweeps in a separate process, as a program or forked:
`publisher.py ROOT_OR_URL REQUEST_ID COUNT [STEP]`.

Says what it published, or class and reason of what it raised; the program in one JSON line per attempt.
"""

import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import structlog

from shared.errors import NeapError
from shared.registry.factory import open_registry
from shared.registry.registry import Registry

BLOB = b"weights " * 50_000


def publish_named(registry: Registry, name: str) -> int:
    blobs = {"shared": BLOB, "own": name.encode()}
    return registry.publish("tiny", {"by": name}, blobs, request_id=name).version


def killing_at(step: str) -> Callable[[str], None]:
    """A step hook that kills this process at that step."""

    def kill_at(name: str) -> None:
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill_at


def run(root: str, request_id: str, count: int, step: str = "", say: Callable[[Any], object] = print) -> None:
    """`step`: where this process is killed. `say` gets what each attempt has come to. Without a request id, sweeps."""
    # Log lines go elsewhere, because standard output carries the results.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    registry = open_registry(root, step=killing_at(step))
    if not request_id:
        registry.sweep(grace_s=0)
    for number in range(count):
        try:
            version = publish_named(registry, f"{request_id}-{number}")
        except NeapError as error:
            say({"error": type(error).__name__, "reason": error.reason})
        else:
            say({"version": version})
    registry.close()


def run_forked(pipe: Connection, environment: Mapping[str, str], *arguments: Any) -> None:
    """`run` in a process of the fork server, whose environment is an older one."""
    os.environ.update(environment)
    run(*arguments, say=pipe.send)


FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload([__name__])


def forked(*arguments: object) -> tuple[Any, Connection]:
    """The process, and the pipe through which it says what it does. It is forked by a process that has all imports."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run_forked, args=(theirs, dict(os.environ), *arguments))
    process.start()
    theirs.close()
    return process, ours


def killed_at(place: str, step: str, request_id: str = "one") -> None:
    """A publication, or without a request id a sweep, in a process that is killed at that step."""
    process, _ = forked(place, request_id, 1, step)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


if __name__ == "__main__":
    if limit := os.environ.get("FILE_SIZE_LIMIT"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    run(*sys.argv[1:3], int(sys.argv[3]), *sys.argv[4:], say=lambda said: print(json.dumps(said)))
