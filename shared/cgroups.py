"""Finds the folders in which the kernel shows the control groups of this process, of version 1 and version 2."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")


def folders(controller: str) -> Iterator[tuple[int, Path]]:
    """The version and the folder of each group that can limit this process: its own groups and their ancestors.

    `controller`: "cpu" or "memory". A folder need not exist. Yields nothing where there are no cgroups.
    """
    try:
        lines = PROCESS_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            # On a system with both versions, version 2 is mounted below the root.
            version, mounts = 2, [ROOT, ROOT / "unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, [ROOT / controllers, ROOT / controller]
        else:
            continue
        for mount in mounts:
            for folder in _upwards(mount, path):
                yield version, folder


def _upwards(mount: Path, path: str) -> list[Path]:
    """The cgroup's folder and its ancestors.

    In a container, `path` may be the path on the host, of which only the last part exists here.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    return [mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]
