"""What a pass over several tokens takes on a CPU, by the instruction sets of its kernels.

    python -m bench.passes --model DIR [--paths avx512bf16 amx] [--tokens 1 2 4 8 16 32 96] [--rounds 16]

A pass is over that many new tokens of one sequence after 32 others, through all layers and the head. The sets take
turns within each round. Medians in ms; `ratio`: the median over rounds of the first set's time over this one's.
"""

import statistics
from functools import partial

import torch

from bench.machine import described
from bench.options import add_dtypes, each_model, load, make_parser
from bench.stopwatch import timed
from bench.table import head, row
from shared import ops
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.inference import inference

NUM_CACHED = 32


@inference
def samples(
    runner: ContiguousRunner, paths: list[str], sizes: list[int], rounds: int
) -> dict[tuple[int, str], list[float]]:
    """Seconds by number of tokens and set, one figure per round."""
    cache = runner.new_cache(NUM_CACHED + max(sizes))
    ids = torch.ones(1, NUM_CACHED + max(sizes), dtype=torch.long)
    runner.run(ids[:, :NUM_CACHED], cache, first=0, last=runner.num_layers, base=0)

    def one(size: int, path: str) -> None:
        ops.set_cpu_isa(path)
        states = runner.run(ids[:, :size], cache, first=0, last=runner.num_layers, base=NUM_CACHED)
        runner.choices(states[0]).tolist()

    return timed({(size, path): partial(one, size, path) for path in paths for size in sizes}, rounds)


def main() -> None:
    parser = make_parser(__doc__, many=True)
    add_dtypes(parser)
    parser.add_argument("--paths", nargs="+", default=["avx512bf16", "amx"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 96])
    parser.add_argument("--rounds", type=int, default=16)
    for options in each_model(parser):
        loaded = load(options)
        runner = ContiguousRunner(loaded)
        found = samples(runner, options.paths, options.tokens, options.rounds)
        print(described(loaded.device))
        head("tokens", *(f"{path}, ms" for path in options.paths), *(f"ratio, {path}" for path in options.paths[1:]))
        for size in options.tokens:
            first, *others = (found[size, path] for path in options.paths)
            ratios = [statistics.median(a / b for a, b in zip(first, other, strict=True)) for other in others]
            row(
                size,
                *(f"{statistics.median(own) * 1e3:.1f}" for own in (first, *others)),
                *(f"{r:.2f}" for r in ratios),
            )


if __name__ == "__main__":
    main()
