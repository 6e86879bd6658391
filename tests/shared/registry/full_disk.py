"""Publishes into a folder on a small file system that is filled to its last byte at each step:
`full_disk.py FOLDER STEP..`.

One JSON line per step: what the publication ended with, what can be read then, here and by another client, which parts
are left, and what publishing the same again ended with once there was room. Without a step, sweeps the full file
system: what a publication ended with before, how many objects were removed, and what it ended with then.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import structlog

from shared.errors import NeapError
from shared.registry.factory import open_registry
from shared.registry.registry import Registry


def outcome(registry: Registry, request_id: str) -> str:
    try:
        blobs = {"x": request_id.encode() * 10_000}
        made = registry.publish("tiny", {"by": request_id}, blobs, request_id=request_id)
        assert registry.read_blob(registry.get("tiny", made.version), "x")
        return str(made.version)
    except NeapError as error:
        return error.reason


def versions(registry: Registry) -> list[int]:
    listed = registry.list_versions("tiny")
    assert not any(version.damage for version in listed)
    assert registry.aliases("tiny") == ({"latest": listed[0].version} if listed else {})
    return [version.version for version in listed]


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    folder = Path(sys.argv[1])
    root, ballast = folder / "registry", folder / "ballast"

    def fill_up() -> None:
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError), ballast.open("ab", buffering=0) as file:
                while file.write(b"x" * size):
                    pass

    if not sys.argv[2:]:
        registry = open_registry(str(root))
        assert outcome(registry, "one") == "1"
        registry._contents.put("blobs", b"left over" * 10_000)
        fill_up()
        ended = outcome(registry, "two")
        print(json.dumps([ended, registry.sweep(grace_s=0).num_removed, outcome(registry, "two")]))
    for wanted in sys.argv[2:]:

        def fill(step: str, wanted: str = wanted) -> None:
            if step == wanted:
                fill_up()

        registry = open_registry(str(root), step=fill)
        ended = outcome(registry, wanted)
        other = open_registry(str(root))
        read = [versions(registry), versions(other)]
        left = [path.name for path in (root / "parts").iterdir()]
        ballast.unlink(missing_ok=True)
        print(json.dumps([wanted, ended, *read, left, outcome(other, wanted)]), flush=True)
        registry.close()
        other.close()


if __name__ == "__main__":
    main()
