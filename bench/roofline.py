"""Times the ops of exits, choices and paged attention against PyTorch's equivalents and against the time that moving their bytes takes.

    python -m bench.roofline [--device cuda] [--tokens 1 2 4 8] [--threads 2] [--rounds 40] [--json FILE]

SmolLM2's sizes (D 576, 4,587 draft tokens, V 49,152) and those of an 8B Llama (D 4096, 8,192, V 128,256).

Microseconds with cold caches (`bench.stopwatch`). On a CPU: lower quartiles, because others may be using the machine; before every
call 64 MB of other memory are read, as a verify pass would, so weights come from memory. On a GPU: medians of calls in a CUDA graph,
with the L2 cache swept before each. The contenders of a line take turns within each round.

`floor`: all threads read as many bytes as the op must read and write; on a GPU a copy moves them. `GFLOP`: two per product.
`PyTorch`: the modules that the engine ran before it had kernels, eager; on a GPU without the launch overhead, as they are in a graph.
`PyTorch half`: the same with float16 weights.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import copy_bytes_per_s
from bench.machine import described
from bench.plain_draws import PlainDraws
from bench.stopwatch import Contenders, stopwatch
from shared import ops
from shared.ladder.confidence_head import HIGHEST, LOWEST, ConfidenceHead
from shared.ladder.draws import confidence_weights
from shared.ladder.head_rows import projection
from shared.ops.choices import choose_greedy, choose_sampled
from shared.ops.exits import draft_top, new_tickets, route
from shared.ops.library import runs_on
from shared.ops.paged import paged_attention

SIZES = {576: (4587, 49152), 4096: (8192, 128256)}  # draft vocabulary and vocabulary
TOKENS = {"cpu": (1, 2, 4, 8), "cuda": (1, 8, 32, 64)}
# Dtype of states, keys and values, as in the engine.
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
HEADS = {576: (9, 3, 64), 4096: (32, 8, 128)}  # query heads, key heads, width of a head
CONTEXT, BLOCK_TOKENS = 1024, 16


@dataclass(frozen=True)
class Line:
    """One op at one size. `megabytes`: read and written. `gflop`: floating-point operations. `times_us`: by contender."""

    op: str
    width: int
    tokens: int
    megabytes: float
    gflop: float
    times_us: dict[str, float]

    def printed(self) -> str:
        figures = " ".join(
            f"{name} {value:8.{self._decimals}f}" for name, value in self.times_us.items()
        )
        return (
            f"{self.op:>15} D={self.width:<5} N={self.tokens:<3} {self.megabytes:8.2f} MB"
            f" {self.gflop:7.4f} GFLOP  {figures}"
        )

    def row(self) -> str:
        """A table row for bench/RESULTS.md. Its ratios: the best of PyTorch's times to ours, and ours to the floor."""
        times = self.times_us
        plain = min(times[name] for name in ("PyTorch", "PyTorch half") if name in times)
        cells = [
            self.op,
            self.width,
            self.tokens,
            f"{self.megabytes:.2f}",
            f"{1000 * self.gflop:.1f}",
        ]
        cells += [f"{times[name]:.{self._decimals}f}" for name in ("floor", "PyTorch")]
        cells += [f"{times['PyTorch half']:.1f}" if "PyTorch half" in times else ""]
        cells += [
            f"{times['neap']:.{self._decimals}f}",
            f"{plain / times['neap']:.1f}",
            f"{times['neap'] / times['floor']:.1f}",
        ]
        return f"| {' | '.join(map(str, cells))} |"

    @property
    def _decimals(self) -> int:
        return 1 if max(self.times_us.values()) < 100 else 0


class Bench:
    """Times contenders in turns, with cold caches. `tokens`: the numbers of tokens to time."""

    def __init__(self, device: torch.device, rounds: int, tokens: Sequence[int]) -> None:
        self.device, self.tokens = device, tuple(tokens)
        self.dtype = DTYPE[device.type]
        self.lines: list[Line] = []
        self._stopwatch = stopwatch(device, rounds)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def line(
        self, op: str, width: int, tokens: int, num_bytes: float, flop: float, runs: Contenders
    ) -> None:
        """Times `runs` and a floor of `num_bytes`, prints the line and adds it to `lines`."""
        runs = {"floor": self._stopwatch.floor(num_bytes), **runs}
        times = self._stopwatch.times_us(runs)
        found = Line(op, width, tokens, num_bytes / 1e6, flop / 1e9, times)
        self.lines.append(found)
        print(found.printed(), flush=True)


def bench_draws(bench: Bench, width: int) -> None:
    """Times the draft vocabulary and the confidence head of an exit."""
    size, _ = SIZES[width]
    confidence = ConfidenceHead(width).requires_grad_(False)
    rows = torch.randn(size, width) / width**0.5
    ways = {"PyTorch": PlainDraws(confidence, projection(rows, None))}
    if bench.on_gpu:
        ways["PyTorch half"] = ways["PyTorch"].halved(rows)
    small, weights = rows.half(), confidence_weights(confidence)
    hidden_size = weights.hidden.numel()
    for tokens in bench.tokens:
        adapted = torch.randn(tokens, width)
        place, tickets = torch.ones(tokens, dtype=torch.int64), new_tickets(tokens, bench.device)
        top, _, log_mass = draft_top(adapted, small, None, 2)
        others = (top, log_mass, place, LOWEST, HIGHEST, tickets)
        each = bench.line
        each("draft_top", width, tokens, 2 * small.numel(), 2 * small.numel() * tokens, {
            **{name: partial(way.draft_top, adapted) for name, way in ways.items()},
            "neap": partial(draft_top, adapted, small, None, 2),
            "neap float32": partial(draft_top, adapted, rows, None, 2),
        })  # fmt: skip
        each("route", width, tokens, 2 * hidden_size, 2 * hidden_size * tokens, {
            **{name: partial(way.route, adapted, place, top) for name, way in ways.items()},
            "neap": partial(route, adapted, weights, *others),
        })  # fmt: skip


def bench_choices(bench: Bench, width: int) -> None:
    """Times choosing tokens from logits over the model's vocabulary."""
    vocabulary = SIZES[width][1]
    for tokens in bench.tokens:
        logits = torch.randn(tokens, vocabulary)
        bench.line("choose_greedy", width, tokens, logits.numel() * 4, 0,
                   {"PyTorch": partial(logits.argmax, -1), "neap": partial(choose_greedy, logits)})  # fmt: skip
        if tokens == 1:
            probabilities = logits.double().softmax(-1)
            uniforms = torch.rand(tokens, dtype=torch.float64)

            def drawn(target: Tensor = probabilities[0], uniform: float = 0.7) -> object:
                total = target.cumsum(-1)
                # On a GPU the total stays on the device: reading it would synchronise, which a capture forbids.
                point = uniform * (total[-1] if bench.on_gpu else float(total[-1]))
                return torch.searchsorted(total, point, right=True), torch.searchsorted(
                    total, total[-1]
                )

            bench.line("choose_sampled", width, 1, probabilities.numel() * 8, 0,
                       {"PyTorch": drawn, "neap": partial(choose_sampled, probabilities, uniforms)})  # fmt: skip


def bench_paged(bench: Bench, width: int) -> None:
    """Times paged attention of one token of each of N sequences of CONTEXT positions, with blocks in random order in the pool."""
    heads, kv_heads, size = HEADS[width]
    table_blocks = CONTEXT // BLOCK_TOKENS
    for tokens in bench.tokens:

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape).to(bench.dtype)

        q, (k, v) = drawn(tokens, heads, size), drawn(2, tokens, kv_heads, size).unbind()
        keys, values = drawn(2, tokens * table_blocks, kv_heads, BLOCK_TOKENS, size).unbind()
        block_tables = torch.randperm(tokens * table_blocks).view(tokens, table_blocks)
        table_indices, positions = torch.arange(tokens), torch.full((tokens,), CONTEXT - 1)
        places = (positions, positions, positions)
        arguments = (q, k, v, keys, values, block_tables, table_indices, *places)

        def plain(
            q: Tensor = q,
            keys: Tensor = keys,
            values: Tensor = values,
            block_tables: Tensor = block_tables,
        ) -> object:
            k, v = (t[block_tables].transpose(1, 2).flatten(2, 3) for t in (keys, values))
            return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

        moved = 2 * tokens * CONTEXT * kv_heads * size * keys.element_size()
        bench.line("paged_attention", width, tokens, moved, 4 * tokens * CONTEXT * heads * size,
                   {"PyTorch": plain, "neap": partial(paged_attention, *arguments)})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=TOKENS, default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", help="1 2 4 8; 1 8 32 64 on a GPU")
    parser.add_argument("--widths", type=int, nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if not runs_on(arguments.device):
        parser.error(f"neap's kernels are not built for {arguments.device}: make build-ops")
    print(described(arguments.device))
    if on_gpu:
        speed = copy_bytes_per_s("cuda")
        print(f"a copy within memory: {speed / 1e9:.0f} GB/s, read and written; us")
        torch.set_default_device("cuda")
    else:
        print(f"{ops.cpu_isa()}, {arguments.threads} threads, us")
    with torch.inference_mode():
        device = torch.device(arguments.device)
        bench = Bench(device, arguments.rounds, arguments.tokens or TOKENS[device.type])
        for width in arguments.widths:
            bench_draws(bench, width)
            bench_choices(bench, width)
            bench_paged(bench, width)
    print(
        "\n| op | D | tokens | MB | MFLOP | floor | PyTorch | half | neap | PyTorch / neap | neap / floor |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(line.row() for line in bench.lines))
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(line) for line in bench.lines], indent=1))


if __name__ == "__main__":
    main()
