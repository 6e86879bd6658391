"""Times the fused router kernel of TIDE 0.2.1. The user downloads and unpacks TIDE's source package; none of it is part of neap.

    pip download --no-deps --no-binary :all: --no-build-isolation tide-inference==0.2.1 && tar xzf tide_inference-0.2.1.tar.gz
    python -m bench.tide tide_inference-0.2.1
    python -m bench.gpu --tide tide_inference-0.2.1    beside our router op

The op is called as TIDE's runtime calls it: N states of width D in bfloat16, the model's final norm in bfloat16 (the op converts it to
float32 at every call), router matrices transposed and in float32.

`as called`: microseconds of one call of many in a CUDA graph, if the kernel can be captured. It cannot if it is launched on the
default stream; then events around a loop of calls are used, which include the host's time where that is longer. `kernel`: the kernel
alone, by the profiler. `error`: the largest difference from the scores of PyTorch in float64. Weights are in the L2 cache, as in
`bench.gpu`.
"""

import argparse
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.stopwatch import median_call_us
from shared.errors import NeapError, NotFound, PreconditionFailed
from shared.ops.build import find_ninja

T = TypeVar("T")

PACKAGE = "tide-inference"
SOURCES = (
    "extensions/torch_bindings.cpp",
    "kernels/fused_layernorm_route.cu",
    "kernels/batch_compact.cu",
    "kernels/exit_scatter.cu",
    "kernels/exit_projection.cu",
)
KERNEL = "fused_layernorm_route"
BOTTLENECK = 128
CALLS = 50
LEGEND = (
    "TIDE: norm, D -> 128, SiLU, 1, sigmoid; threshold and exits are further ops there, not timed. neap: also biases and three features\n"
    "of the draft's logits, and calibration."
)


@dataclass(frozen=True)
class TideTimes:
    """Times for one number of tokens. `us`: "as called", measured in a CUDA graph if `in_graph`, else in a loop. `kernel_us`: NaN if
    the profiler saw no kernel. `error`: the largest difference from the expected scores."""

    us: float
    in_graph: bool
    kernel_us: float
    error: float

    def printed(self) -> str:
        method = "" if self.in_graph else " (loop)"
        kernel = "not seen" if math.isnan(self.kernel_us) else f"{self.kernel_us:.1f}"
        return f"{self.us:.1f}{method} | {kernel}"


def sources(folder: Path) -> list[Path]:
    """The files of TIDE's kernels in the unpacked package. Raises `NotFound` if `folder` is another package or a file is missing."""
    about = folder / "PKG-INFO"
    if not about.is_file() or f"Name: {PACKAGE}\n" not in about.read_text(encoding="utf-8"):
        raise NotFound(
            f"{folder} is not the unpacked source package of {PACKAGE}: PKG-INFO is missing or names another package"
        )
    found = [folder / "csrc" / name for name in SOURCES]
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise NotFound(f"missing in {folder}: {', '.join(missing)}; is this version 0.2.1?")
    return found


def build(folder: Path) -> None:
    """Compiles the kernels with TIDE's own flags and registers torch.ops.tide. Raises `NotFound`, `PreconditionFailed`."""
    files = sources(folder)
    # torch takes ninja from PATH; the one installed with this environment is beside the interpreter.
    os.environ["PATH"] = f"{Path(find_ninja()).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        # Imported here because it needs setuptools, which nothing else in neap needs.
        from torch.utils.cpp_extension import load

        load(
            "tide_kernels",
            [str(path) for path in files],
            extra_cflags=["-O3"],
            extra_cuda_cflags=["-O3", "--use_fast_math", "-lineinfo"],
            is_python_module=False,
        )
    except (ImportError, RuntimeError, OSError) as error:
        raise PreconditionFailed(
            f"TIDE's kernels cannot be built here: {error}", reason="TIDE_BUILD_FAILED"
        ) from error


def tide_router(folder: Path, width: int, tokens: Sequence[int]) -> dict[int, TideTimes]:
    """Times by number of tokens. They are measured in separate processes, because a failed capture can make a process unusable.

    Raises `NotFound`, `PreconditionFailed`.
    """
    sources(folder)
    found = _in_own_process(_timed_in_loops, folder, width, tuple(tokens))
    if isinstance(found, str):
        raise PreconditionFailed(found, reason="TIDE_BUILD_FAILED")
    try:
        graphs = _in_own_process(_timed_in_graphs, folder, width, tuple(tokens))
    except BrokenProcessPool:
        graphs = {}
    for count, us in graphs.items():
        found[count] = replace(found[count], us=us, in_graph=True)
    return found


def _in_own_process(work: Callable[[Path, int, tuple[int, ...]], T], *arguments: Any) -> T:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


@torch.no_grad()
def _timed_in_loops(
    folder: Path, width: int, tokens: tuple[int, ...]
) -> dict[int, TideTimes] | str:
    """Times without graphs, or the message of the build's error: our error classes cannot be pickled between processes."""
    try:
        build(folder)
    except NeapError as error:
        return error.message
    found = {}
    for count in tokens:
        call, largest_error = _call(count, width)
        found[count] = TideTimes(_loop_us(call), False, _kernel_us(call), largest_error)
    return found


@torch.no_grad()
def _timed_in_graphs(folder: Path, width: int, tokens: tuple[int, ...]) -> dict[int, float]:
    """Microseconds by number of tokens, up to the first whose capture fails."""
    build(folder)
    found: dict[int, float] = {}
    for count in tokens:
        us = _graph_us(_call(count, width)[0])
        if us is None:
            break
        found[count] = us
    return found


def _call(tokens: int, width: int) -> tuple[Callable[[], Tensor], float]:
    """(a call of the op on random states and weights, the largest error of its scores)."""
    states = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    gain = torch.rand(width, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(width, BOTTLENECK, device="cuda") * width**-0.5
    up = torch.randn(BOTTLENECK, 1, device="cuda") * BOTTLENECK**-0.5

    def call() -> Tensor:
        scores: Tensor = torch.ops.tide.fused_layernorm_route(states, gain, down, up, 1e-6)
        return scores

    return call, float((call() - expected_scores(states, gain, down, up)).abs().max())


def expected_scores(states: Tensor, gain: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The scores [N], float64, that TIDE's router defines, from states [N, D], gain [D], down [D, B] and up [B, 1]."""
    x = states.double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain.double()
    inner = torch.nn.functional.silu(normed @ down.double())
    return torch.sigmoid(inner @ up.double())[:, 0]


def _loop_us(call: Callable[[], Tensor]) -> float:
    return median_call_us(lambda: [call() for _ in range(CALLS)], CALLS)


def _kernel_us(call: Callable[[], Tensor]) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    kernels = [
        event.time_range.elapsed_us()
        for event in profile.events() or []
        if f"{KERNEL}_kernel" in event.name or f"{KERNEL}_generic" in event.name
    ]
    return float(statistics.median(kernels)) if kernels else math.nan


def _graph_us(call: Callable[[], Tensor]) -> float | None:
    """Microseconds per call, or None if the kernel cannot be captured.

    Either the capture raises, or the kernel runs outside the graph. Then the replay leaves the outputs NaN.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            scores = [call() for _ in range(CALLS)]
        for each in scores:
            each.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        if not all(bool(each.isfinite().all()) for each in scores):
            return None
        return median_call_us(graph.replay, CALLS)
    except RuntimeError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked package")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    options = parser.parse_args()
    try:
        sources(options.folder)
        if not torch.cuda.is_available():
            parser.error("there is no CUDA device, and TIDE has no CPU kernels")
        found = tide_router(options.folder, options.width, options.tokens)
    except NeapError as error:
        parser.error(error.message)
    print(LEGEND)
    print(f"\nD {options.width}, us\n| N | as called | kernel | error |\n|---|---|---|---|")
    for tokens, times in found.items():
        print(f"| {tokens} | {times.printed()} | {times.error:.1e} |")


if __name__ == "__main__":
    main()
