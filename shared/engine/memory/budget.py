"""The memory budget of keys and values. It is fixed at start-up, so that requests queue when it is used up and nothing
crashes."""

import math
import sys
from pathlib import Path

import psutil
import torch

from shared import cgroups
from shared.model.runner import Runner

# Share of the memory that is free once the model is loaded. Activations and other processes need the rest.
BUDGET_SHARE = 0.5
# Ladders may take this share of what the budget leaves, and these bytes in any case.
LADDER_SHARE, LEAST_LADDER_BYTES = 0.25, 256 << 20
# Requests that share each step by default; on a GPU as many as have TOKENS_OF_A_REQUEST each, up to the rows of a pass.
MAX_RUNNING, TOKENS_OF_A_REQUEST, MOST_RUNNING = 16, 2048, 256
# A cgroup's files: limits in bytes, use in bytes, statistics, and the name of the statistic of cached files that can be
# dropped. Above memory.high the kernel slows a process down, so it counts as a limit.
_CGROUP_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
MEMINFO = Path("/proc/meminfo")


def kv_token_bytes(runner: Runner) -> int:
    """Bytes of the keys and values of one token, over all layers."""
    cache = runner.new_cache(1)
    runner.reserve(cache)
    return cache.kv_bytes // cache.capacity


def round_up_to_blocks(num_tokens: int, block_tokens: int) -> int:
    """`num_tokens` rounded up to a multiple of `block_tokens`."""
    return -(-num_tokens // block_tokens) * block_tokens


def default_budget(device: torch.device) -> int:
    """Bytes of keys and values that all sequences share."""
    return int(BUDGET_SHARE * available_bytes(device))


def default_ladder_bytes(device: torch.device, kv_budget_bytes: int) -> int:
    """Bytes of all ladders that are bound. Called once a GPU has allocated the keys and values, which elsewhere come as
    they are used."""
    free = available_bytes(device) - (0 if device.type == "cuda" else kv_budget_bytes)
    return max(int(LADDER_SHARE * free), LEAST_LADDER_BYTES)


def card_budget(device: torch.device, share: float) -> int:
    """Bytes of keys and values with which a share of a GPU's memory is taken."""
    free, total = torch.cuda.mem_get_info(device)
    return max(int(free - (1 - share) * total), 0)


def default_max_running(device: torch.device, kv_budget_tokens: int) -> int:
    """Requests that share each step where nobody says how many."""
    if device.type != "cuda":
        return MAX_RUNNING
    return min(max(kv_budget_tokens // TOKENS_OF_A_REQUEST, MAX_RUNNING), MOST_RUNNING)


def available_bytes(device: torch.device) -> int:
    """Free memory of `device`: that of a GPU, or the smaller of the free memory of this machine and of its
    container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(min(_machine_bytes(), _container_bytes()))


def _machine_bytes() -> int:
    if sys.platform != "linux":
        return int(psutil.virtual_memory().available)
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{MEMINFO} names no MemAvailable")


def _container_bytes() -> float:
    """Memory that the limits of this process' cgroups leave; infinite without a limit."""
    left = (_left(version, folder) for version, folder in cgroups.folders("memory"))
    return min(left, default=math.inf)


def _left(version: int, folder: Path) -> float:
    """Memory that the limits of one cgroup leave; infinite if it has none or cannot be read."""
    limit_names, usage_name, droppable_name = _CGROUP_FILES[version]
    try:
        texts = [path.read_text() for name in limit_names if (path := folder / name).exists()]
        limits = [int(text) for text in texts if text.strip() != "max"]
        if not limits:
            return math.inf
        used = int((folder / usage_name).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        # The kernel drops cached files before it kills anybody.
        droppable = int(dict(line.split() for line in lines).get(droppable_name, 0))
    except (OSError, ValueError):
        return math.inf
    return max(min(limits) - used + droppable, 0)
