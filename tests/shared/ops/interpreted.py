"""Runs the Triton kernels of paged attention in Triton's interpreter, in a process of its own, because a process either
interprets kernels or compiles them: `python -m tests.shared.ops.interpreted SOURCE CALLS RESULTS`."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.ops import paged_on_gpu
from tests.shared.ops.paged_passes import Pass

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "shared" / "ops" / "paged_kernel.py"


@dataclass(frozen=True)
class Call:
    """A pass on a device of this compute capability. `split` and `num_processors` as of `by_kernels`."""

    made: Pass
    split: bool | None = None
    capability: int = 90
    num_processors: int = 4


def interpreted(calls: list[Call], folder: Path, source: Path = SOURCE) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The results of calls, and the keys and values that they leave. `source`: of the kernels."""
    torch.save([vars(call.made) | {"options": (call.split, call.capability, call.num_processors)} for call in calls],
               folder / "calls")  # fmt: skip
    command = [sys.executable, "-m", __spec__.name, str(source), str(folder / "calls"), str(folder / "results")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[tuple[Tensor, Tensor, Tensor]] = torch.load(folder / "results")
    return results


def main(source: str, calls: str, results: str) -> None:
    torch.set_num_threads(1)
    found = importlib.util.spec_from_file_location("paged_kernel", source)
    assert found is not None
    assert found.loader is not None
    kernels = importlib.util.module_from_spec(found)
    found.loader.exec_module(kernels)
    made: list[Any] = []
    for arguments in torch.load(calls):
        split, capability, num_processors = arguments.pop("options")
        out = paged_on_gpu.by_kernels(
            **arguments, capability=capability, num_processors=num_processors, split=split, kernels=kernels
        )
        made.append((out, arguments["keys"], arguments["values"]))
    torch.save(made, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
