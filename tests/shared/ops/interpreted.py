"""Runs Triton kernels in Triton's interpreter, in a process of its own, because a process either interprets kernels or
compiles them: `python -m tests.shared.ops.interpreted` answers for each folder that it reads, to the end of its
input. All tests of a process ask the same one, since it takes seconds to start."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.ops import paged_on_gpu
from shared.ops.blocks import Blocks
from shared.ops.products import Grouping, multiplied, normed
from tests.shared.ops.paged_passes import Pass

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "shared" / "ops" / "paged_kernel.py"
PRODUCTS = SOURCE.with_name("product_kernel.py")


@dataclass(frozen=True)
class Call:
    """A pass on a device of this compute capability. `split` and `num_processors` as of `by_kernels`."""

    made: Pass
    split: bool | None = None
    capability: int = 90
    num_processors: int = 4


def interpreted(calls: list[Call], folder: Path, source: Path = SOURCE) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The results of calls, and the keys and values that they leave. `source`: of the kernels."""
    options = [{name: value for name, value in vars(call).items() if name != "made"} for call in calls]
    arguments = [vars(call.made) | own for call, own in zip(calls, options, strict=True)]
    return launched("attended", arguments, folder, source)


def launched(launch: str, calls: list[dict[str, Any]], folder: Path, source: Path = PRODUCTS) -> list[Any]:
    """What LAUNCHES[launch] gives for the arguments of each call."""
    torch.save((launch, str(source), calls), folder / "calls")
    interpreter = _interpreter()
    assert interpreter.stdin is not None
    assert interpreter.stdout is not None
    print(folder, file=interpreter.stdin, flush=True)
    if interpreter.stdout.readline() != "done\n":
        _interpreter.cache_clear()
        raise AssertionError(f"the interpreter has ended by {interpreter.wait()}; its error stands above")
    results: list[Any] = torch.load(folder / "results")
    return results


def planted(source: Path, right: str, wrong: str, folder: Path) -> Path:
    """The kernels of `source` with a bug: a text that stands there once is another one."""
    text = source.read_text()
    assert text.count(right) == 1
    changed = folder / source.name
    changed.write_text(text.replace(right, wrong))
    return changed


@cache
def _interpreter() -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", __spec__.name], cwd=ROOT, env=environment, text=True, **pipes)


def _attended(kernels: Any, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return paged_on_gpu.by_kernels(kernels=kernels, **arguments), arguments["keys"], arguments["values"]


def _multiplied(kernels: Any, weight: Any, grouping: Any = None, **arguments: Any) -> Tensor:
    own = weight if isinstance(weight, Tensor) else Blocks(*weight)
    choices = grouping and Grouping(*grouping)
    return multiplied(weight=own, grouping=choices, kernels=kernels, **arguments)


LAUNCHES = {"attended": _attended, "multiplied": _multiplied, "normed": normed}


def _sum_in_order() -> None:
    """Makes the interpreter add products in one order. What BLAS gives for a token depends on its company on some
    processors."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: Any, a: Any, b: Any, d: Any, *precision: Any) -> TensorHandle:
        left, right = (each.data.astype(d.data.dtype, copy=False) for each in (a, b))
        total = np.zeros_like(d.data)
        for k in range(left.shape[-1]):
            total += left[..., k, None] * right[..., k, None, :]
        return TensorHandle(total + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = dot


def main() -> None:
    torch.set_num_threads(1)
    _sum_in_order()
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        launch, source, calls = torch.load(folder / "calls")
        found = importlib.util.spec_from_file_location("kernels", source)
        assert found is not None
        assert found.loader is not None
        kernels = importlib.util.module_from_spec(found)
        found.loader.exec_module(kernels)
        torch.save([LAUNCHES[launch](kernels=kernels, **arguments) for arguments in calls], folder / "results")
        print("done", flush=True)


if __name__ == "__main__":
    main()
