"""The memory budget of keys and values. It is fixed at start-up, so that requests queue when it is used up and nothing crashes."""

from pathlib import Path

import torch

from shared.model.runner import Runner

# Share of the memory that is free once the model is loaded. Activations and other processes need the rest.
BUDGET_SHARE = 0.5
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def kv_token_bytes(runner: Runner) -> int:
    """Bytes of the keys and values of one token, over all layers."""
    cache = runner.new_cache(1)
    token = torch.zeros(1, 1, dtype=torch.long, device=runner.loaded.device)
    runner.run(token, cache, first=0, last=runner.num_layers, base=0)
    runner.counters.reset()
    return cache.kv_bytes // cache.capacity


def round_up_to_blocks(num_tokens: int, block_tokens: int) -> int:
    """`num_tokens` rounded up to a multiple of `block_tokens`."""
    return -(-num_tokens // block_tokens) * block_tokens


def default_budget(device: torch.device) -> int:
    """Bytes of keys and values that all sequences share."""
    return int(BUDGET_SHARE * available_bytes(device))


def available_bytes(device: torch.device) -> int:
    """Free memory of `device`: that of a GPU, or the smaller of the free memory of this machine and of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(min(_machine_bytes(), _container_bytes()))


def _machine_bytes() -> int:
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{MEMINFO} names no MemAvailable")


def _container_bytes() -> float:
    """Memory that the limit of this process' cgroup (version 2) leaves; infinite without a limit."""
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
