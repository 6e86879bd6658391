"""Fits torch's threads to the CPUs of this process, for programs that did not size the pools before torch was
loaded."""

import os
from collections.abc import MutableMapping
from pathlib import Path

import torch

from shared.cpus import usable_cpus

CPUS = Path("/sys/devices/system/cpu")
# With one of them the user has chosen a number.
CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def fit_torch_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lowers torch's number of threads to `usable_cpus`, unless it has been chosen: by a variable, or by
    `torch.set_num_threads`.

    torch itself counts the CPUs that it may run on, not the time on them that a container's quota allows. Threads that
    wait for each other then stop each other: 16 threads in the time of 2 CPUs give no answer for minutes.
    """
    if any(name in environment for name in CHOSEN_BY):
        return
    num_threads, usable = torch.get_num_threads(), usable_cpus()
    # Any other number than torch's own was set.
    if num_threads > usable and num_threads in _default_numbers():
        torch.set_num_threads(usable)


def _default_numbers() -> set[int]:
    """The numbers of threads that torch may choose by itself: CPUs or cores, of the machine or allowed to this
    process."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        try:
            cores.add((CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return {os.cpu_count() or 1, len(allowed), len(cores)}
