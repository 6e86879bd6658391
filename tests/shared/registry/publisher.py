"""Publishes in a separate process: `publisher.py ROOT_OR_URL REQUEST_ID COUNT [STEP]`.
With STEP, it kills itself at that step.

Prints what it published, or class and reason of what it raised, as one JSON line per attempt.
"""

import json
import os
import resource
import signal
import sys

import structlog

from shared.errors import NeapError
from shared.registry.factory import open_registry
from shared.registry.registry import Registry

BLOB = b"weights " * 50_000


def publish_named(registry: Registry, name: str) -> int:
    blobs = {"shared": BLOB, "own": name.encode()}
    return registry.publish("tiny", {"by": name}, blobs, request_id=name).version


def main() -> None:
    # Log lines go elsewhere, because standard output carries the results.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    root, request_id, count, *rest = sys.argv[1:]
    if limit := os.environ.get("FILE_SIZE_LIMIT"):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))

    def step(name: str) -> None:
        if rest and name == rest[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    registry = open_registry(root, step=step)
    for number in range(int(count)):
        try:
            version = publish_named(registry, f"{request_id}-{number}")
        except NeapError as error:
            print(json.dumps({"error": type(error).__name__, "reason": error.reason}))
        else:
            print(json.dumps({"version": version}))
    registry.close()


if __name__ == "__main__":
    main()
