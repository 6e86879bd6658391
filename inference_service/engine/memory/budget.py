"""How much memory keys and values may take: decided once, at start-up, so that running out is a queue and not a crash."""

from pathlib import Path

import torch

from shared.model.runner import DepthRunner

# Of what is free once the model is loaded; the rest is for activations, and for whatever else runs there.
BUDGET_SHARE = 0.5
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def slot_bytes(runner: DepthRunner) -> int:
    """Bytes of keys and values that one position of one sequence takes, over all layers."""
    cache = runner.new_cache(1)
    token = torch.zeros(1, 1, dtype=torch.long, device=runner.loaded.device)
    runner.run(token, cache, first=0, last=runner.num_layers, base=0)
    runner.counters.reset()
    return cache.kv_bytes // cache.capacity


def whole_pages(num_slots: int, page_slots: int) -> int:
    """Positions that so many take up where they are given out `page_slots` at a time."""
    return -(-num_slots // page_slots) * page_slots


def default_budget(device: torch.device) -> int:
    """Bytes for all sequences together."""
    return int(BUDGET_SHARE * available_bytes(device))


def available_bytes(device: torch.device) -> int:
    """What is free on `device`: of a GPU's memory, or of this container's and this machine's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(min(_machine_bytes(), _container_bytes()))


def _machine_bytes() -> int:
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{MEMINFO} names no MemAvailable")


def _container_bytes() -> float:
    """What a memory limit on this process' cgroup (version 2) leaves; without limit, infinity."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        # The kernel drops cached files before it kills anybody.
        statistics = dict(
            line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()
        )
    except OSError:
        return float("inf")
    if limit == "max":
        return float("inf")
    return max(int(limit) - used + int(statistics.get("inactive_file", 0)), 0)
