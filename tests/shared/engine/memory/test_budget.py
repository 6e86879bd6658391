from pathlib import Path

import pytest
import torch

from shared import cgroups
from shared.engine.memory import budget
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from tests.families import NUM_LAYERS, build_family

CPU = torch.device("cpu")


def v2(limit: str, used: int = 700, *, high: str = "max", cached: int = 150) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 500\ninactive_file {cached}\n",
    }


def v1(limit: int, used: int = 700) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        # The first counts this group alone, its use those below it as well.
        "memory.stat": "inactive_file 20\ntotal_inactive_file 150\n",
    }


V1_UNLIMITED = 9223372036854771712
SERVICE = "system.slice/neap.service"
# (the files of each cgroup by its folder, /proc/self/cgroup, the bytes that are left; None: those of the machine)
CASES: dict[str, tuple[dict[str, dict[str, str]], str, int | None]] = {
    "a container": ({"": v2("1000")}, "0::/\n", 1000 - 700 + 150),
    "used up": ({"": v2("1000", 1200)}, "0::/\n", 0),
    "without a limit": ({"": v2("max")}, "0::/\n", None),
    "MemoryMax of a systemd service": ({SERVICE: v2("1000")}, f"0::/{SERVICE}\n", 450),
    "MemoryHigh is lower": ({SERVICE: v2("1000", high="800")}, f"0::/{SERVICE}\n", 250),
    "MemoryHigh alone": ({SERVICE: v2("max", high="900")}, f"0::/{SERVICE}\n", 350),
    "the slice has less left than the service": (
        {"system.slice": v2("5000", 4900, cached=0), SERVICE: v2("1000")},
        f"0::/{SERVICE}\n",
        100,
    ),
    "the machine's path in a container": ({"": v2("1000")}, "0::/kubepods/pod1/c1\n", 450),
    "another service's limit": ({"system.slice/other": v2("1000")}, f"0::/{SERVICE}\n", None),
    "version 1": ({"memory/docker/a": v1(1000)}, "4:memory:/docker/a\n3:cpu:/x\n", 450),
    "version 1 limited above": (
        {"memory/docker": v1(1000), "memory/docker/a": v1(V1_UNLIMITED)},
        "4:memory:/docker/a\n0::/\n",
        450,
    ),
    "version 1 without a limit": ({"memory": v1(V1_UNLIMITED)}, "4:memory:/\n", None),
    "damaged": ({"": v2("nonsense")}, "0::/\n", None),
    "no cgroups": ({}, "", None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_limits_of_cgroups_count(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, process, left = CASES[name]
    for folder, files in groups.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (tmp_path / folder / file).write_text(text)
    (tmp_path / "process").write_text(process)
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "PROCESS_CGROUPS", tmp_path / "process")
    if left is None:
        assert budget.available_bytes(CPU) > 1 << 20
    else:
        assert budget.available_bytes(CPU) == left
        assert budget.default_budget(CPU) == left // 2


@pytest.mark.parametrize(("kv_dtype", "number_bytes"), [(None, 4), (torch.bfloat16, 2)])
def test_a_token_takes_the_bytes_of_the_kv_dtype(kv_dtype: torch.dtype | None, number_bytes: int) -> None:
    runner = ContiguousRunner(wrap_model(build_family("llama"), accelerate=True, kv_dtype=kv_dtype))
    kv_heads, width = 2, 8
    assert budget.kv_token_bytes(runner) == 2 * NUM_LAYERS * kv_heads * width * number_bytes


@pytest.mark.parametrize(
    ("total_gb", "model_gb", "budget_gb", "token_bytes", "max_running"),
    [
        (80, 16, 56, 131_072, 208),  # an 8B model on an H100
        (16, 3, 11.4, 28_672, 194),
        (80, 1, 71, 23_040, 256),
        (8, 7.5, 0, 131_072, 16),
    ],
)
def test_a_gpu_is_filled_to_nine_tenths(monkeypatch, total_gb, model_gb, budget_gb, token_bytes, max_running):
    sizes = int((total_gb - model_gb) * 1e9), int(total_gb * 1e9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: sizes)
    found = budget.card_budget(torch.device("cuda"), 0.9)
    assert found == pytest.approx(budget_gb * 1e9, abs=1)
    assert budget.default_max_running(torch.device("cuda"), found // token_bytes) == max_running
    assert budget.default_max_running(CPU, found // token_bytes) == budget.MAX_RUNNING
