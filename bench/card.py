"""What a borrowed GPU must say in twelve minutes, most important first.

    python -m bench.card --out FILE [--part 1 2 3] [--stage NAME ..] [--model SmolLM2.gguf]

Each stage is a process of its own with a limit of seconds. Its figures are in FILE, a JSON object a line, as soon as it
has ended, and are printed beside those of PREDICTED, which are written before a card is at hand. A stage that fails or
runs past its limit says so and does not end the others. Each part fits a call of ten minutes; parts 2 and 3 need the
model. `--device cpu` only checks that the stages work.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import DeviceType, ProfilerActivity, profile

from bench import batch, decode, make_router
from bench.answers import answer_all
from bench.decode_figures import EXACT
from bench.gpu import compare, copy_bytes_per_s, free, weight_bytes
from bench.imposed import SHAPES, impose
from bench.machine import described
from bench.options import add_device, load, make_parser, parsed
from bench.prompts import DEFAULT_FILE, first_turns
from bench.roofline import BLOCK_TOKENS, HEADS, exit_times_us
from bench.stopwatch import medians_s, seconds_of, stopwatch
from bench.table import head, row
from bench.worker import READY_S, worker_process
from shared.engine.engine import Engine
from shared.engine.request.request import GenerationRequest
from shared.ladder.folder import read_ladder
from shared.ladder.policy import DepthPolicy
from shared.ops.blocks import Blocks, arranged
from shared.ops.paged import paged_attention
from shared.ops.product_tiles import LEAST_TOKENS
from shared.ops.products import blocks_linear, expert_linear, grouped, invariant_linear

ROOT = Path(__file__).parents[1]
SHARE = 0.8  # of tokens where imposed exits are right
SHAPE = {"cuda": "llama-3.1-8b", "cpu": "tiny"}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
MATMUL = {"cuda": 8192, "cpu": 256}
ROUTER_S = 150
STEPS = 32
# New tokens and sequences, with so many keys before them, of `attention`.
ATTENDED = {
    "1 token": (1, 1, 1024), "5 tokens": (5, 1, 1024), "64 sequences": (1, 64, 1024), "2,048 tokens": (2048, 1, 6144),
}  # fmt: skip
# Rows and columns of the matrices of a layer of an 8B shape, and tokens, of `products`.
MATRICES = {"cuda": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), "cpu": ((64, 256), (32, 256))}
MULTIPLIED = {"cuda": (1, 16, 64, 256, 2048), "cpu": (1, 16)}
KINDS = ("Q4_K", "Q6_K", "Q8_0")
# Experts, choices of a token, and rows and columns of gate and up of a layer of Qwen3-30B-A3B.
EXPERTS = {"cuda": (128, 8, 1536, 2048), "cpu": (4, 2, 64, 64)}
Figures = dict[str, float]
Options = argparse.Namespace

# Of this tree on an H100, by arithmetic from the figures of 2026-11-26 (RESULTS.md): kernels as measured there, the
# host hidden behind them (bench.host), and the tokens per pass that drafts of an exit that is right at .8 give. Drafts
# are taken for .65 ms of an 8B shape and .35 of SmolLM2, and twice that beside 128 requests.
PREDICTED: Mapping[str, Figures] = {
    # A sequence's keys are read once, for five tokens as for one; the rest moves bytes or multiplies at 350 TFLOP/s.
    "attention": {
        "failures": 0, "errors": 0, "1 token, us": 12, "5 tokens, us": 13, "64 sequences, us": 115,
        "2,048 tokens, us": 700,
    },
    "ceilings": {"copy, GB/s": 2980, "matmul, TFLOP/s": 700},
    # Rows are read at 2.6 TB/s, tokens from the L2 cache; a choice is two launches, and a wait for memory in each.
    "kernels": {
        "failures": 0, "errors": 0, "draft_top, us, 1": 31, "draft_top, us, 8": 31, "draft_top, us, 32": 36,
        "draft_top, us, 64": 50, "route, us, 1": 6, "route, us, 8": 9, "route, us, 32": 10, "route, us, 64": 14,
        "choose_greedy, us, 1": 5.5, "choose_greedy, us, 64": 18, "choose_sampled, us, 1": 7,
    },
    # Products that do not depend on company read weights at 80 % of a copy's speed, where the vendor's reach 89, and
    # multiply at 350 TFLOP/s instead of 600. Blocks dequantise in about six operations a weight: what the processors
    # can do in the time that a third of the bytes takes.
    "products": {
        "failures": 0, "errors": 0, "own / vendor's, 1": 1.12, "own / vendor's, 16": 1.12, "own / vendor's, 64": 1.15,
        "own / vendor's, 256": 1.6, "own / vendor's, 2048": 1.6, "Q4_K / vendor's, 16": 0.6,
        "Q6_K / vendor's, 16": 0.75, "Q8_0 / vendor's, 16": 0.7, "Q4_K / vendor's, 2048": 2.2,
        # 8 and about 82 matrices of 6.3 MB, and the small kernels that sort: 5 us.
        "experts, us, 1": 26, "experts, us, 16": 225,
    },
    "short": {
        "full 1": 146, "exact / full 1": 2.8, "exact / full 8": 2.1, "exact / full 32": 1.35, "exact / full 128": 1.2,
        "share of the floor": 0.73,
    },
    "long": {"exact / full 1": 2.3, "exact / full 8": 1.6, "exact / full 32": 1.1},
    # 2,048 tokens are 33 TFLOP of products at 600 TFLOP/s, and attention adds a tenth of that at 8,192.
    "prompts": {"2,048 tokens, ms": 65, "8,192 tokens, ms": 265, "8,192 tokens / products": 1.2, "cancelled, ms": 50},
    "steps": {"full, kernels, ms": 6.7, "full, step, ms": 6.9},
    "small": {"full 1": 830, "exact / full 1": 1.4, "exact / full 8": 1.3, "exact / full 32": 1.1},
    "calibrated": {"exact / full": 1.4},
    # The budget of a start. Twelve sizes of pass are compiled at 4 s, and at .8 s where their code is kept (a CPU: two
    # sizes, 74 and 25 s); imports and checks take 10 s, and 40 recordings 4 s.
    "start": {"first, ready, s": 65, "later, ready, s": 25},
}  # fmt: skip


def ceilings(options: Options) -> Figures:
    device, size = options.device, MATMUL[options.device]
    figures = {"copy, GB/s": copy_bytes_per_s(device) / 1e9}
    free(device)
    square = torch.ones(size, size, dtype=torch.bfloat16, device=device)

    def multiply() -> None:
        square @ square
        _wait(device)

    return figures | {"matmul, TFLOP/s": 2 * size**3 / medians_s({"": multiply}, 9, 2)[""] / 1e12}


def attention(options: Options) -> Figures:
    """Attention is right and has the same bits in any company, or nothing of it is timed. Then microseconds of a layer
    of an 8B shape, with cold caches."""
    figures = tested("tests/gpu/test_kernels_on_gpu.py", "-k", "paged or attends or places")
    if figures["failures"] or figures["errors"]:
        return figures
    device, dtype = torch.device(options.device), DTYPE[options.device]
    heads, kv_heads, width = HEADS[4096]
    watch = stopwatch(device, 20)
    for name, (count, rows, before) in ATTENDED.items():
        tokens, blocks = count * rows, -(-(before + count) // BLOCK_TOKENS)
        q = torch.randn(tokens, heads, width, dtype=dtype, device=device)
        k, v = torch.randn(2, tokens, kv_heads, width, dtype=dtype, device=device).unbind()
        size = (2, rows * blocks, kv_heads, BLOCK_TOKENS, width)
        keys, values = torch.randn(size, dtype=dtype, device=device).unbind()
        tables = torch.randperm(rows * blocks, device=device).view(rows, blocks)
        indices = torch.arange(rows, device=device).repeat_interleave(count)
        positions = torch.arange(before, before + count, device=device).repeat(rows)
        run = partial(paged_attention, q, k, v, keys, values, tables, indices, positions)
        figures[f"{name}, us"] = watch.times_us({"": run})[""]
    return figures


def products(options: Options) -> Figures:
    """Products whose bits do not depend on company, and those with blocks: right, and then how long those of a layer
    take beside the vendor's."""
    figures = tested("tests/gpu/test_kernels_on_gpu.py", "-k", "product or multiplies or norms")
    if figures["failures"] or figures["errors"]:
        return figures
    device, dtype = torch.device(options.device), DTYPE[options.device]
    shapes = MATRICES[options.device]
    weights = [torch.randn(size, dtype=dtype, device=device) for size in shapes]

    def blocks(kind: str) -> list[Blocks]:
        block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        raw = [
            torch.zeros(rows, width // block * num_bytes, dtype=torch.uint8, device=device) for rows, width in shapes
        ]
        return [arranged(each, kind, width) for each, (_, width) in zip(raw, shapes, strict=True)]

    sides: dict[str, Callable[[Tensor, int], Tensor]] = {
        "vendor's": lambda x, place: functional.linear(x, weights[place]),
        "own": lambda x, place: invariant_linear(x, weights[place]),
    }

    def in_blocks(kind: str, held: list[Blocks], x: Tensor, place: int) -> Tensor:
        return blocks_linear(x, held[place], kind)

    sides |= {kind: partial(in_blocks, kind, blocks(kind)) for kind in KINDS}
    for count in MULTIPLIED[options.device]:
        inputs = [torch.randn(count, width, dtype=dtype, device=device) for _, width in shapes]

        def layer(multiply: Callable[[Tensor, int], Tensor], inputs: list[Tensor] = inputs) -> None:
            for place, x in enumerate(inputs):
                multiply(x, place)

        taken = stopwatch(device, 20).times_us({name: partial(layer, side) for name, side in sides.items()})
        figures[f"vendor's, us, {count}"] = taken["vendor's"]
        figures |= {f"{name} / vendor's, {count}": taken[name] / taken["vendor's"] for name in ("own", *KINDS)}
    experts, choices, *size = EXPERTS[options.device]
    held = torch.randn(experts, *size, dtype=dtype, device=device)

    def chosen(count: int) -> Callable[[], Tensor]:
        x = torch.randn(count, size[1], dtype=dtype, device=device)
        index = torch.rand(count, experts, device=device).topk(choices).indices
        return lambda: expert_linear(x, [held], index, grouped(index, experts, LEAST_TOKENS), size[0])

    return figures | stopwatch(device, 20).times_us({f"experts, us, {count}": chosen(count) for count in (1, 16)})


def kernels(options: Options) -> Figures:
    """The tests that need a card: ops, choices, captured passes. Then microseconds of the ops of exits and choices."""
    return tested("tests/gpu") | exit_times_us(torch.device(options.device), (1, 8, 32, 64))


def tested(*arguments: str) -> Figures:
    """The counts of a run of tests, in this process, which the limit ends."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        with redirect_stdout(sys.stderr):
            pytest.main(["-q", f"--junitxml={report}", *arguments])
        suite = next(ElementTree.parse(report).iter("testsuite"))
        return {name: float(suite.get(name, "nan")) for name in ("tests", "failures", "errors", "skipped")}


def shape(options: Options, num_keys: int, batches: list[int]) -> Figures:
    device = options.device
    speed = copy_bytes_per_s(device)
    free(device)  # a later small tensor could take a piece of the large block and keep it
    imposed = impose(SHAPES[SHAPE[device]], (0,), SHARE, device=device, dtype=DTYPE[device])
    found = compare(imposed, batches, 2, num_keys)
    floor_s = weight_bytes(imposed.loaded.model) / speed
    figures = {"floor, ms": 1e3 * floor_s, "share of the floor": found[1]["full"] * floor_s}
    return figures | {f"{name} {number}": value for number, own in found.items() for name, value in own.items()}


def prompts(options: Options) -> Figures:
    """Milliseconds until the first token of long prompts, beside those of their products alone, and until a prompt
    that is cancelled while it is read leaves the device to others."""
    device = options.device
    shape = replace(SHAPES[SHAPE[device]], context_length={"cuda": 16384, "cpu": 512}[device])
    imposed = impose(shape, (0,), SHARE, device=device, dtype=DTYPE[device])
    longest = imposed.loaded.context_length - 2
    figures: Figures = {}
    with Engine(imposed.loaded, prefix_cache_bytes=0) as engine:
        engine.warm_up()
        for length in (2048, 8192):
            prompt = imposed.prompt(7, min(length, longest))
            run = partial(answer_all, engine, [prompt], DepthPolicy("full"), max_tokens=1)
            figures[f"{length:,} tokens, ms"] = 1e3 * medians_s({"": run}, 5)[""]
        long = GenerationRequest(tuple(prompt), policy=DepthPolicy("full"))
        reading = engine.submit(long)
        time.sleep(figures["8,192 tokens, ms"] / 4e3)
        reading.cancel()
        short = partial(answer_all, engine, [imposed.prompt(3, 8)], DepthPolicy("full"), max_tokens=1)
        figures["cancelled, ms"] = 1e3 * seconds_of(short)
    layers = [module for module in imposed.loaded.model.model.layers.modules() if isinstance(module, nn.Linear)]
    rows = {size: torch.ones(min(2048, longest), size, dtype=DTYPE[device], device=device)
            for size in {layer.in_features for layer in layers}}  # fmt: skip

    def multiply() -> None:
        for layer in layers:
            layer(rows[layer.in_features])
        _wait(device)

    with torch.inference_mode():
        products_ms = 1e3 * medians_s({"": multiply}, 5)[""] * min(8192, longest) / min(2048, longest)
    return figures | {"8,192 tokens / products": figures["8,192 tokens, ms"] / products_ms}


def steps(options: Options) -> Figures:
    """One request: milliseconds of a step, of its kernels, and its launches of kernels, copies and graphs."""
    device = options.device
    imposed = impose(SHAPES[SHAPE[device]], (0,), SHARE, device=device, dtype=DTYPE[device])
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    figures: Figures = {}
    with Engine(imposed.loaded, imposed.ladder, prefix_cache_bytes=0) as engine:
        engine.warm_up()
        for name in ("full", "exact"):
            prompts = [imposed.prompt(7, 32)]
            run = partial(answer_all, engine, prompts, DepthPolicy(name), max_tokens=4 * STEPS, ignore_eos=True)
            run()
            with profile(activities=kinds) as profiler:
                [answer] = run()
            seconds = seconds_of(run)
            passes = max(answer.finished.depth.num_verify_passes, 1) if answer.finished else 1
            events = profiler.events() or ()
            on_card = [event for event in events if event.device_type == DeviceType.CUDA]
            calls = [event for event in events if event.name.startswith("cu")]
            figures[f"{name}, step, ms"] = 1e3 * seconds / passes
            figures[f"{name}, kernels, ms"] = sum(event.device_time for event in on_card) / 1e3 / passes
            figures[f"{name}, kernels"] = len(on_card) / passes
            figures[f"{name}, calls of the driver"] = len(calls) / passes
    return figures


def small(options: Options) -> Figures:
    """SmolLM2 with the shipped router."""
    dtype = {"dtype": torch.bfloat16} if options.device == "cuda" else {}
    loaded, ladder = load(options, **dtype), read_ladder(ROOT / "bench" / "router")
    batches = [1, 8, 32] if options.device == "cuda" else [1]
    prompts = first_turns(loaded, DEFAULT_FILE, 6)
    with Engine(loaded, max_running=max(batches)) as engine:
        engine.warm_up()
        speeds, num_differing = batch.measure(engine, ladder, prompts, batches, 2)
    figures: Figures = {"answers that differ": num_differing}
    for number in batches:
        full, exact = (sum(speeds[f"{policy} {number}"]) / 2 for policy in ("full", "exact"))
        figures |= {f"full {number}": full, f"exact / full {number}": exact / full}
    return figures


def calibrated(options: Options) -> Figures:
    """A router of SmolLM2 made in ROUTER_S seconds, and its speed."""
    where = ["--model", options.model, "--device", options.device]
    where += ["--dtype", "bfloat16"] if options.device == "cuda" else []
    with tempfile.TemporaryDirectory() as folder:
        out = ["--work-dir", f"{folder}/work", "--out", f"{folder}/router", "--hours", str(ROUTER_S / 3600)]
        seconds = seconds_of(lambda: make_router.main([*where, *out, "--nice", "0"]))
        flags = ["--router", f"{folder}/router", "--no-hf", "--per-task", "2"]
        [found] = decode.main([*where, *flags]).values()
    ratios = [sides[EXACT]["speed_up"] for sides in found.values()]
    return {"seconds": seconds, "exact / full": sum(ratios) / len(ratios)}


def start(options: Options) -> Figures:
    """Seconds until a worker serves SmolLM2: with nothing compiled, and with what the first start has left."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "later"):
            began_s, flags = time.monotonic(), ["--device", options.device]
            with worker_process(options.model, Path(folder) / "registry", Path(folder) / "log", flags) as worker:
                worker.wait_serving(READY_S)
                figures[f"{name}, ready, s"] = time.monotonic() - began_s
                worker.wait_complete(READY_S)
                figures[f"{name}, complete, s"] = time.monotonic() - began_s
    return figures


@dataclass(frozen=True)
class Stage:
    part: int
    limit_s: float
    run: Callable[[Options], Figures]


STAGES: Mapping[str, Stage] = {
    "attention": Stage(1, 100, attention),
    "ceilings": Stage(1, 60, ceilings),
    "kernels": Stage(1, 200, kernels),
    "short": Stage(1, 240, partial(shape, num_keys=32, batches=[1, 8, 32, 128])),
    "long": Stage(2, 200, partial(shape, num_keys=1024, batches=[1, 8, 32])),
    "prompts": Stage(2, 100, prompts),
    "steps": Stage(2, 100, steps),
    "small": Stage(2, 150, small),
    "calibrated": Stage(3, 300, calibrated),
    "start": Stage(3, 200, start),
    "products": Stage(3, 100, products),
}


def run_stage(name: str, command: list[str], limit_s: float) -> dict[str, Any]:
    """The record of a stage: its figures, or why there are none."""
    start_s, record = time.monotonic(), {"stage": name}
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=limit_s, check=True, text=True)
        record |= {"figures": json.loads(done.stdout.splitlines()[-1])}
    except subprocess.TimeoutExpired:
        record |= {"failed": f"took longer than {limit_s:g} s"}
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        record |= {"failed": str(error)}
    return record | {"seconds": round(time.monotonic() - start_s, 1)}


def show(record: Mapping[str, Any], predicted: Figures) -> None:
    print(f"\n{record['stage']}: {record['seconds']:.0f} s {record.get('failed', '')}".rstrip(), flush=True)
    if "figures" in record:
        head("figure", "predicted", "found")
        for name, value in record["figures"].items():
            row(name, f"{predicted[name]:g}" if name in predicted else "", f"{value:.4g}")


def main() -> None:
    parser = make_parser(__doc__, model=False)
    add_device(parser)
    parser.set_defaults(device="cuda")
    parser.add_argument("--out", type=Path, help="is appended to")
    parser.add_argument("--part", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--stage", nargs="+", choices=list(STAGES), help="these alone")
    parser.add_argument("--model", help="SmolLM2's .gguf file")
    parser.add_argument("--within", choices=list(STAGES), help=argparse.SUPPRESS)
    options = parsed(parser)
    if options.within:  # in the stage's process
        print(json.dumps(STAGES[options.within].run(options)))
        return
    print(described(options.device), flush=True)
    chosen = options.stage or [name for name, stage in STAGES.items() if stage.part in options.part]
    for name in chosen:
        flags = ["--within", name, "--device", options.device, *(["--model", options.model] if options.model else [])]
        record = run_stage(name, [sys.executable, "-m", "bench.card", *flags], STAGES[name].limit_s)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
        show(record, PREDICTED.get(name, {}))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
