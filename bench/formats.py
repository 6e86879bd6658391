"""Times the products of a whole model in each weight format and on each instruction set, beside reading the same bytes once.

    python -m bench.formats [--formats F32 BF16 Q4_1 ..] [--paths avx512 avx2] [--tokens 1 2 4 8 16] [--rounds 9]

Random weights in the shapes of SmolLM2-135M; those of K-quants have 512 instead of 576 inputs, because their blocks hold 256. Medians
in ms of a pass over all matrices. `floor`: all threads read as many bytes from one block. All contenders take turns within each round.
No attention, no norms: `bench.floor` times passes of a whole model.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import gguf
import numpy as np
import torch
from torch import Tensor

from bench.floor import timed_ms
from shared import ops

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
NUM_LAYERS, VOCABULARY = 30, 49152


def shapes(width: int) -> list[tuple[int, int]]:
    """[outputs, inputs] of every matrix of a pass."""
    layer = [(960, width), (576, width), (1536, width), (1536, width), (576, 1536)]
    return layer * NUM_LAYERS + [(VOCABULARY, width)]


def packed_matrix(kind: str, rows: int, columns: int, rng: np.random.Generator) -> Tensor:
    """A random matrix in the format `kind`."""
    if kind in DTYPES:
        weight = rng.standard_normal((rows, columns), dtype=np.float32)
        return ops.pack_linear(torch.from_numpy(weight).to(DTYPES[kind]))
    inputs, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    # Bytes below 100 make finite scales.
    blocks = rng.integers(0, 100, (rows, columns // inputs * size), dtype=np.uint8)
    return ops.pack_blocks(torch.from_numpy(blocks), kind, columns)


def multiply_all(
    path: str, matrices: list[tuple[Tensor, int, int]], inputs: dict[int, Tensor]
) -> None:
    ops.set_cpu_isa(path)
    for packed, rows, columns in matrices:
        ops.packed_linear(inputs[columns], packed, rows)


def available(paths: list[str]) -> list[str]:
    """The paths that this machine has."""
    found = []
    for path in paths:
        try:
            ops.set_cpu_isa(path)
        except RuntimeError:
            continue
        found.append(path)
    ops.set_cpu_isa("auto")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=[*DTYPES, *BLOCKS])
    parser.add_argument("--paths", nargs="+", default=["avx512", "avx2"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    paths = available(options.paths)
    print(f"{torch.get_num_threads()} threads; this machine serves with {ops.cpu_isa()}")
    print(f"| format | MB | floor | path | {' | '.join(map(str, options.tokens))} |")
    print("|---" * (4 + len(options.tokens)) + "|")
    with torch.inference_mode():
        for kind in options.formats:
            print_format(kind, paths, options.tokens, options.rounds)


def print_format(kind: str, paths: list[str], token_counts: list[int], rounds: int) -> None:
    rng = np.random.default_rng(0)
    sizes = shapes(512 if kind.endswith("_K") else 576)
    matrices = [(packed_matrix(kind, *size, rng), *size) for size in sizes]
    num_bytes = sum(packed.numel() for packed, _, _ in matrices)
    runs: dict[tuple[str, int], Callable[[], object]] = {
        ("floor", 1): torch.ones(num_bytes // 4).sum
    }
    for path in paths:
        for count in token_counts:
            inputs = {columns: torch.randn(count, columns) for _, columns in sizes}
            runs[path, count] = partial(multiply_all, path, matrices, inputs)
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            samples[key].append(timed_ms(run))
    ops.set_cpu_isa("auto")
    medians = {key: statistics.median(values) for key, values in samples.items()}
    for path in paths:
        cells = " | ".join(f"{medians[path, count]:.1f}" for count in token_counts)
        print(f"| {kind} | {num_bytes / 1e6:.0f} | {medians['floor', 1]:.1f} | {path} | {cells} |")


if __name__ == "__main__":
    main()
