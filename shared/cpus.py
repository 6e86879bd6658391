"""Determines how many CPUs this process may use and sizes the thread pools of libraries accordingly."""

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

from shared import cgroups

THREADS_VARIABLE = "NEAP_THREADS"
# Libraries read these when they are loaded or create their first pool: OpenMP (torch and the kernels of shared.ops),
# numpy's BLAS, tokenizers and safetensors (rayon), obstore (tokio). Without these variables they use all CPUs of the
# machine.
POOL_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TOKIO_WORKER_THREADS",
)

# How often a thread of OpenMP looks before it sleeps, while it waits for others or for work: some tens of
# microseconds. By default it looks for milliseconds, which takes the core from what it waits for: docs/decisions/007.
# Read by libgomp when torch is imported.
SPINS_VARIABLE, SPINS = "GOMP_SPINCOUNT", "1000"


def usable_cpus() -> int:
    """Return the smaller of the CPU affinity and the container's CPU quota (rounded up), at least 1.

    The quota is the smallest quota of this process' cgroup and its ancestors, in cgroup version 2 (`cpu.max`) or
    version 1 (`cpu.cfs_quota_us`).
    """
    num_allowed = _num_allowed()
    quota = _quota()
    return max(1, num_allowed if quota is None else min(num_allowed, math.ceil(quota)))


def size_thread_pools(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that tell libraries how many threads to create, and how they wait.
    Call it in a main module before torch or numpy is imported.

    The number is that of the setting NEAP_THREADS, else `usable_cpus`. Variables that are already set are kept. If this
    process may use all CPUs, no number is set, because libraries choose better defaults for CPUs that share a core.
    """
    wait_briefly(environment)
    setting = environment.get(THREADS_VARIABLE, "")
    # The service itself refuses other values.
    num_threads = int(setting) if setting.isdecimal() and int(setting) else usable_cpus()
    if num_threads < (os.cpu_count() or 1):
        for name in POOL_VARIABLES:
            environment.setdefault(name, str(num_threads))


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set how threads of OpenMP wait, unless it is chosen. Call it before torch is imported."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault(SPINS_VARIABLE, SPINS)


def _num_allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota() -> float | None:
    """Return the CPU quota in CPUs. None if there is no limit or there are no cgroups."""
    quotas = [_quota_v2(folder) if version == 2 else _quota_v1(folder) for version, folder in cgroups.folders("cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


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
