"""Publishes into a folder on a small file system that is filled to its last byte at each step: `full_disk.py FOLDER STEP..`.

One JSON line per step: what the publication ended with, what can be read then, here and by another client, and what publishing the
same again ended with once there was room.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import structlog

from shared.errors import NeapError
from shared.registry.local import LocalRegistry


def outcome(registry: LocalRegistry, request_id: str) -> str:
    try:
        blobs = {"x": request_id.encode() * 10_000}
        made = registry.publish("tiny", {"by": request_id}, blobs, request_id=request_id)
        assert registry.read_blob(registry.get("tiny", made.version), "x")
        return str(made.version)
    except NeapError as error:
        return error.reason


def versions(registry: LocalRegistry) -> list[int]:
    listed = registry.list_versions("tiny")
    assert not any(version.damage for version in listed)
    assert registry.aliases("tiny") == ({"latest": listed[0].version} if listed else {})
    return [version.version for version in listed]


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    folder = Path(sys.argv[1])
    ballast = folder / "ballast"
    for wanted in sys.argv[2:]:
        root = folder / "registry"

        def fill(step: str, wanted: str = wanted) -> None:
            if step == wanted:
                for size in (1 << 16, 1 << 12, 1):
                    with suppress(OSError), ballast.open("ab", buffering=0) as file:
                        while file.write(b"x" * size):
                            pass

        registry = LocalRegistry(root, step=fill)
        ended = outcome(registry, wanted)
        other = LocalRegistry(root)
        read = [versions(registry), versions(other)]
        left = sorted(str(path.relative_to(root)) for path in root.rglob("*.part"))
        ballast.unlink(missing_ok=True)
        wanted_again = outcome(other, wanted)
        records = len(list(root.rglob("*.json")))
        print(json.dumps([wanted, ended, *read, left, wanted_again, records]), flush=True)
        registry.close()
        other.close()


if __name__ == "__main__":
    main()
