"""Times the fused router kernel of TIDE 0.2.1, built from a folder that whoever runs this has unpacked; none of it is part of neap.

    pip download --no-deps --no-binary :all: --no-build-isolation tide-inference==0.2.1 && tar xzf tide_inference-0.2.1.tar.gz
    python -m bench.tide tide_inference-0.2.1          or, beside our router op: python -m bench.gpu --tide tide_inference-0.2.1

Called as TIDE's runtime calls it: N states of width D in bfloat16, the model's final norm in bfloat16 (which the op turns into float32
at every call), router matrices transposed and in float32. `as called`: where a CUDA graph's replay computes anew, a call among many in a
graph; otherwise, as the kernel is launched on the default stream and its result allocated, events around a loop of calls, so that the
host's time counts where it is longer. `kernel`: the kernel alone, by the profiler. `error`: the largest difference from PyTorch's in
float64. Weights are in the L2 cache, as in `bench.gpu`.
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
    """Microseconds of N tokens. `in_graph` says how `us` was taken; `kernel_us` is NaN where the profiler sees no kernels."""

    us: float
    in_graph: bool
    kernel_us: float
    error: float

    def printed(self) -> str:
        way = "" if self.in_graph else " (loop)"
        kernel = "not seen" if math.isnan(self.kernel_us) else f"{self.kernel_us:.1f}"
        return f"{self.us:.1f}{way} | {kernel}"


def sources(folder: Path) -> list[Path]:
    """The files of TIDE's kernels in the unpacked package. Raises `NotFound` where `folder` is not that package."""
    about = folder / "PKG-INFO"
    if not about.is_file() or f"Name: {PACKAGE}\n" not in about.read_text(encoding="utf-8"):
        raise NotFound(
            f"{folder} is not the unpacked source package of {PACKAGE}: its PKG-INFO is missing or another's"
        )
    found = [folder / "csrc" / name for name in SOURCES]
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise NotFound(f"{folder} has no {', '.join(missing)}: another version than 0.2.1?")
    return found


def build(folder: Path) -> None:
    """Compiles the kernels with TIDE's own flags and registers torch.ops.tide. Raises `NotFound`, `PreconditionFailed`."""
    files = sources(folder)
    # Its ninja is the one on PATH; ours stands beside the interpreter.
    os.environ["PATH"] = f"{Path(find_ninja()).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        # Imported here: it wants setuptools, which nothing else of neap does.
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
    """Times by number of tokens, taken in processes of their own: a capture that failed may leave one unfit for anything else.

    Raises `NotFound`, `PreconditionFailed`.
    """
    sources(folder)
    found = _elsewhere(_timed_alone, folder, width, tuple(tokens))
    if isinstance(found, str):
        raise PreconditionFailed(found, reason="TIDE_BUILD_FAILED")
    try:
        graphs = _elsewhere(_timed_in_graphs, folder, width, tuple(tokens))
    except BrokenProcessPool:
        graphs = {}
    for count, us in graphs.items():
        found[count] = replace(found[count], us=us, in_graph=True)
    return found


def _elsewhere(work: Callable[[Path, int, tuple[int, ...]], T], *arguments: Any) -> T:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


@torch.no_grad()
def _timed_alone(folder: Path, width: int, tokens: tuple[int, ...]) -> dict[int, TideTimes] | str:
    """Without graphs; or why there are no times, as our errors do not travel between processes."""
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
    """Microseconds, up to the first number of tokens whose capture does not work."""
    build(folder)
    found: dict[int, float] = {}
    for count in tokens:
        us = _graph_us(_call(count, width)[0])
        if us is None:
            break
        found[count] = us
    return found


def _call(tokens: int, width: int) -> tuple[Callable[[], Tensor], float]:
    """(the op on random states and weights, how far its scores are off)."""
    states = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    gain = torch.rand(width, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(width, BOTTLENECK, device="cuda") * width**-0.5
    up = torch.randn(BOTTLENECK, 1, device="cuda") * BOTTLENECK**-0.5

    def call() -> Tensor:
        scores: Tensor = torch.ops.tide.fused_layernorm_route(states, gain, down, up, 1e-6)
        return scores

    return call, float((call() - expected_scores(states, gain, down, up)).abs().max())


def expected_scores(states: Tensor, gain: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """States [N, D], gain [D], down [D, B], up [B, 1] -> the scores [N] that TIDE's router means, float64."""
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
    """None where the kernel cannot be captured: it is refused, or runs beside the graph, whose replay then computes nothing."""
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
            parser.error("there is no CUDA device, and TIDE's kernels run on nothing else")
        found = tide_router(options.folder, options.width, options.tokens)
    except NeapError as error:
        parser.error(error.message)
    print(LEGEND)
    print(f"\nD {options.width}, us\n| N | as called | kernel | error |\n|---|---|---|---|")
    for tokens, times in found.items():
        print(f"| {tokens} | {times.printed()} | {times.error:.1e} |")


if __name__ == "__main__":
    main()
