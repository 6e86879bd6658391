"""How many CPUs this process may use, and pools of threads of that size."""

import math
import os
from collections.abc import MutableMapping
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")
# Read by libraries when they are loaded, or make their first pool: OpenMP (torch, and the kernels of shared.ops), numpy's
# matrices, tokenizers and safetensors (rayon), obstore (tokio). Left alone they count the machine's CPUs.
POOL_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TOKIO_WORKER_THREADS",
)


def usable_cpus(
    wanted: int | None = None,
    *,
    cgroup_root: Path = CGROUP_ROOT,
    process_cgroups: Path = PROCESS_CGROUPS,
) -> int:
    """`wanted` where it is given. Otherwise what affinity allows and the container's CPU quota, rounded up; at least 1.

    The quota is the least of those of this process' cgroup and the ones above it, of version 2 (`cpu.max`) or 1
    (`cpu.cfs_quota_us`).
    """
    if wanted is not None:
        return wanted
    num_allowed = _num_allowed()
    quota = _quota(cgroup_root, process_cgroups)
    return max(1, num_allowed if quota is None else min(num_allowed, math.ceil(quota)))


def size_thread_pools(environment: MutableMapping[str, str] = os.environ) -> None:
    """Tells libraries how many threads to make. For a main module, before it imports torch or numpy.

    What the environment says already holds. Where this process may use the whole machine, nothing is said: libraries know best
    what to do with CPUs that share a core.
    """
    if usable_cpus() < (os.cpu_count() or 1):
        for name in POOL_VARIABLES:
            environment.setdefault(name, str(usable_cpus()))


def _num_allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota(root: Path, process_cgroups: Path) -> float | None:
    """In CPUs; None: no limit, or no cgroups."""
    try:
        lines = process_cgroups.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            # Beside version 1, version 2 is mounted below the root.
            folders, read = [root, root / "unified"], _quota_v2
        elif "cpu" in controllers.split(","):
            folders, read = [root / controllers, root / "cpu"], _quota_v1
        else:
            continue
        for folder in folders:
            quotas += [quota for place in _upwards(folder, path) if (quota := read(place))]
    return min(quotas, default=None)


def _upwards(folder: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it. In a container `path` may be the machine's, of which only the end is visible."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    return [folder.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
