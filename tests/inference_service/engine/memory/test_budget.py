from pathlib import Path

import pytest
import torch

from inference_service.engine.memory import budget
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from tests.families import NUM_LAYERS, build_family

CPU = torch.device("cpu")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(budget, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    return tmp_path


def test_a_container_limit_counts(cgroup: Path) -> None:
    unlimited = budget.available_bytes(CPU)
    assert unlimited > 1 << 20
    (cgroup / "memory.max").write_text("1000\n")
    assert budget.available_bytes(CPU) == 1000 - 700 + 150
    assert budget.default_budget(CPU) == 225
    (cgroup / "memory.current").write_text("1200\n")
    assert budget.available_bytes(CPU) == 0


def test_without_cgroups_the_machine_counts(cgroup: Path) -> None:
    (cgroup / "memory.max").unlink()
    assert budget.available_bytes(CPU) > 1 << 20


@pytest.mark.parametrize(("kv_dtype", "number_bytes"), [(None, 4), (torch.bfloat16, 2)])
def test_a_token_takes_the_bytes_of_the_kv_dtype(
    kv_dtype: torch.dtype | None, number_bytes: int
) -> None:
    runner = ContiguousRunner(wrap_model(build_family("llama"), accelerate=True, kv_dtype=kv_dtype))
    kv_heads, width = 2, 8
    assert budget.kv_token_bytes(runner) == 2 * NUM_LAYERS * kv_heads * width * number_bytes
