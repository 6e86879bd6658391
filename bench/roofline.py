"""Times the ops of exits and batches against what PyTorch does in their place, beside the least that their bytes allow.

    python -m bench.roofline [--threads 2] [--rounds 40] [--json FILE]

SmolLM2's sizes (D 576, rank 288, 4,587 draft tokens, V 49,152) and those of an 8B Llama (D 4096, rank 512, 8,192, V 128,256).
Lower quartiles in microseconds (others may be using the machine); before every call 64 MB of other memory are read, as a deep pass would, so weights come from memory.
The contenders of a line take turns within each round. `floor`: all threads read as many bytes as the op must read and write.
`GFLOP`: of the products, two each.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shared import ops
from shared.ladder.fused_exit import DraftRows, FusedExit
from shared.ladder.head_rows import projection
from shared.ladder.heads import ExitHead
from shared.ladder.routers import HIGHEST, LOWEST, DepthRouter, scalar_features
from shared.ops.batches import gather_rows, scatter_rows, verify_greedy, verify_sampled
from shared.ops.exits import draft_top, exit_head, new_tickets, route
from shared.ops.paged import paged_attention

SIZES = {576: (288, 4587, 49152), 4096: (512, 8192, 128256)}
TOKENS = (1, 2, 4, 8)
SWEPT_FLOATS = 16 << 20
HEADS = {576: (9, 3, 64), 4096: (32, 8, 128)}  # query heads, key heads, width of one
CONTEXT, PAGE_SLOTS = 1024, 16
Contenders = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Line:
    """One op at one size: bytes read and written, floating-point operations, and the lower quartile in us per contender."""

    op: str
    width: int
    tokens: int
    megabytes: float
    gflop: float
    quartiles_us: dict[str, float]

    def printed(self) -> str:
        figures = " ".join(f"{name} {value:8.0f}" for name, value in self.quartiles_us.items())
        return (
            f"{self.op:>15} D={self.width:<5} N={self.tokens:<3} {self.megabytes:8.2f} MB"
            f" {self.gflop:7.4f} GFLOP  {figures}"
        )


def _lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


class Bench:
    """Times contenders that run cold, in turns."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._swept = torch.ones(SWEPT_FLOATS)
        self.lines: list[Line] = []

    def _timed(self, run: Callable[[], object]) -> float:
        self._swept.sum()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def line(
        self, op: str, width: int, tokens: int, num_bytes: float, flop: float, runs: Contenders
    ) -> None:
        runs = {"floor": torch.ones(max(int(num_bytes) // 4, 1)).sum, **runs}
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for index in range(self._rounds + 2):
            for name, run in runs.items():
                seconds = self._timed(run)
                if index >= 2:
                    samples[name].append(seconds * 1e6)
        quartiles = {name: _lower_quartile(values) for name, values in samples.items()}
        found = Line(op, width, tokens, num_bytes / 1e6, flop / 1e9, quartiles)
        self.lines.append(found)
        print(found.printed(), flush=True)


def bench_exit(bench: Bench, width: int) -> None:
    """The whole way of tokens through an exit, and each of its ops alone."""
    rank, size, _ = SIZES[width]
    head = ExitHead("gated", width, width, rank).requires_grad_(False)
    router = DepthRouter(width).requires_grad_(False)
    rows = torch.randn(size, width) / width**0.5
    project, fused = projection(rows, None), FusedExit(head, router, DraftRows.of(rows, None))
    mix, out, small = head.mix.half(), head.out.half(), rows.half()
    weights = fused.router
    mix_size, out_size, hidden_size = mix.numel(), out.numel(), weights.hidden.numel()
    for tokens in TOKENS:
        state, deep = torch.randn(2, tokens, width).unbind()
        ago, tickets = torch.zeros(tokens, dtype=torch.int64), new_tickets(tokens)
        adapted = head(state, deep, ago)
        top, _, log_mass = draft_top(adapted, small, None, 2)
        thresholds = torch.full((tokens,), 0.5)
        others = (top, log_mass, ago, thresholds, LOWEST, HIGHEST, tickets)

        def plain(state: Tensor = state, deep: Tensor = deep, ago: Tensor = ago) -> object:
            adapted = head(state, deep, ago)
            logits = project(adapted)
            probability = router(adapted, scalar_features(logits, ago))
            return logits.argmax(-1), probability

        def plain_top(adapted: Tensor = adapted) -> object:
            logits = project(adapted)
            return logits.argmax(-1), torch.topk(logits, 2), logits.logsumexp(-1)

        def plain_route(
            adapted: Tensor = adapted, ago: Tensor = ago, logits: Tensor = top
        ) -> object:
            leaves = router(adapted, scalar_features(logits, ago)) >= 0.5
            return leaves.int().argsort(stable=True), (~leaves).sum()

        whole = mix_size + out_size + small.numel() + hidden_size
        each = bench.line
        each("exit", width, tokens, 2 * whole, 2 * whole * tokens,
             {"PyTorch": plain, "neap": partial(fused, state, deep, ago)})  # fmt: skip
        each("exit_head", width, tokens, 2 * (mix_size + out_size), 2 * (mix_size + out_size) * tokens, {
            "PyTorch": partial(head, state, deep, ago),
            "neap": partial(exit_head, state, deep, ago, mix, head.offset, out, head.scale, head.gain, 1e-6),
            "neap float32": partial(exit_head, state, deep, ago, head.mix, head.offset, head.out, head.scale, head.gain, 1e-6),
        })  # fmt: skip
        each("draft_top", width, tokens, 2 * small.numel(), 2 * small.numel() * tokens, {
            "PyTorch": plain_top,
            "neap": partial(draft_top, adapted, small, None, 2),
            "neap float32": partial(draft_top, adapted, rows, None, 2),
        })  # fmt: skip
        each("route", width, tokens, 2 * hidden_size, 2 * hidden_size * tokens,
             {"PyTorch": plain_route, "neap": partial(route, adapted, weights, *others)})  # fmt: skip


def bench_batch(bench: Bench, width: int) -> None:
    """Verification over the model's vocabulary, and rows of states taken out and put back."""
    vocabulary = SIZES[width][2]
    for tokens in TOKENS:
        logits = torch.randn(tokens, vocabulary)
        drafts, starts = logits.argmax(-1), torch.tensor([0, tokens])
        probabilities = logits[:1].double().softmax(-1)
        uniforms = torch.rand(tokens, dtype=torch.float64)

        def plain(logits: Tensor = logits, drafts: Tensor = drafts) -> object:
            choices = logits.argmax(-1)
            return choices, (choices == drafts)[:-1].cumprod(0).sum()

        bench.line("verify_greedy", width, tokens, logits.numel() * 4, 0,
                   {"PyTorch": plain, "neap": partial(verify_greedy, logits, drafts, starts)})  # fmt: skip
        if tokens == 1:
            one = (probabilities, drafts, starts, uniforms)

            def drawn(target: Tensor = probabilities[0], uniform: float = 0.7) -> object:
                total = target.cumsum(-1)
                point = uniform * float(total[-1])
                return torch.searchsorted(total, point, right=True), torch.searchsorted(
                    total, total[-1]
                )

            bench.line("verify_sampled", width, 1, probabilities.numel() * 8, 0,
                       {"PyTorch": drawn, "neap": partial(verify_sampled, *one)})  # fmt: skip
        states, order = torch.randn(2 * tokens, width), torch.randperm(2 * tokens)[:tokens]
        taken, moved = states[order], 8 * tokens * width
        bench.line("gather_rows", width, tokens, moved, 0,
                   {"PyTorch": partial(states.index_select, 0, order), "neap": partial(gather_rows, states, order)})  # fmt: skip
        bench.line("scatter_rows", width, tokens, moved, 0,
                   {"PyTorch": partial(states.index_copy_, 0, order, taken), "neap": partial(scatter_rows, states, taken, order)})  # fmt: skip


def bench_paged(bench: Bench, width: int) -> None:
    """A token of each of N rows, every one CONTEXT positions long, its pages anywhere in the pool."""
    heads, kv_heads, size = HEADS[width]
    row_pages = CONTEXT // PAGE_SLOTS
    for tokens in TOKENS:
        q, (k, v) = (
            torch.randn(tokens, heads, size),
            torch.randn(2, tokens, kv_heads, size).unbind(),
        )
        keys, values = torch.randn(2, tokens * row_pages, kv_heads, PAGE_SLOTS, size).unbind()
        pages = torch.randperm(tokens * row_pages).view(tokens, row_pages)
        rows, positions = torch.arange(tokens), torch.full((tokens,), CONTEXT - 1)
        arguments = (q, k, v, keys, values, pages, rows, positions)

        def plain(
            q: Tensor = q, keys: Tensor = keys, values: Tensor = values, pages: Tensor = pages
        ) -> object:
            k, v = (t[pages].transpose(1, 2).flatten(2, 3) for t in (keys, values))
            return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

        moved = 2 * tokens * CONTEXT * kv_heads * size
        bench.line("paged_attention", width, tokens, 4 * moved, 4 * tokens * CONTEXT * heads * size,
                   {"PyTorch": plain, "neap": partial(paged_attention, *arguments)})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        bench = Bench(arguments.rounds)
        print(f"{ops.cpu_isa()}, {arguments.threads} threads, us")
        for width in SIZES:
            bench_exit(bench, width)
            bench_batch(bench, width)
            bench_paged(bench, width)
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(line) for line in bench.lines], indent=1))


if __name__ == "__main__":
    main()
