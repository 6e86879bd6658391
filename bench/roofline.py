"""Times ops against PyTorch's equivalents and against the time that moving their bytes takes.

    python -m bench.roofline [--device cuda] [--tokens 1 2 4 8] [--threads 2] [--rounds 40]

Exits, choices, large heads and paged attention. SmolLM2's sizes (D 576, 4,587 draft tokens, V 49,152) and those of an
8B Llama (D 4096, 8,192, V 128,256). What products and attention take of a step on a CPU: `bench.profile`.

Microseconds with cold caches (`bench.stopwatch`). On a CPU: lower quartiles, because others may be using the machine,
with `--threads 1` of the thread's own time; before every call 64 MB of other memory are read, as a verify pass would,
so weights come from memory. On a GPU: medians of calls in a CUDA graph, with the L2 cache swept before each. The
contenders of a line take turns within each round.

`floor`: all threads read as many bytes as the op must read and write; on a GPU a copy moves them. `GFLOP`: two per
product. `PyTorch`: the modules that the engine ran before it had kernels, eager; on a GPU without the launch overhead,
as they are in a graph. Of heads: argmax of neap's product. `PyTorch half`: the same with float16 weights.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import copy_bytes_per_s
from bench.machine import described
from bench.options import add_device, make_parser, parsed
from bench.stopwatch import Contenders, stopwatch
from bench.table import head, row
from shared import ops
from shared.ladder.confidence_head import HIGHEST, LOWEST, ConfidenceHead, scalar_features
from shared.ladder.draws import confidence_weights
from shared.ladder.head_rows import Matmul
from shared.ops import choose_greedy, choose_sampled, runs_on
from shared.ops.chains import draft_top, new_tickets, route
from shared.ops.paged import paged_attention

SIZES = {576: (4587, 49152), 4096: (8192, 128256)}  # draft vocabulary and vocabulary
# Inputs and vocabulary of a head beside each width: those of Gemma 3 270M and of Llama 3.2 1B.
LARGE_HEADS = {576: (640, 262144), 4096: (2048, 128256)}
TOKENS = {"cpu": (1, 2, 4, 8), "cuda": (1, 8, 32, 64)}
# Dtype of states, keys and values, as in the engine.
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
HEADS = {576: (9, 3, 64), 4096: (32, 8, 128)}  # query heads, key heads, width of a head
CONTEXT, BLOCK_TOKENS = 1024, 16


COLUMNS = ("op", "D", "tokens", "MB", "MFLOP", "floor", "PyTorch", "half", "neap", "PyTorch / neap", "neap / floor",
           "also")  # fmt: skip
# Contenders with columns of their own.
NAMED = ("floor", "PyTorch", "PyTorch half", "neap")


@dataclass(frozen=True)
class Line:
    """One op at one size. `megabytes`: read and written. `gflop`: floating-point operations. `times_us`: by
    contender."""

    op: str
    width: int
    tokens: int
    megabytes: float
    gflop: float
    times_us: dict[str, float]

    def cells(self) -> list[object]:
        """Of a table in bench/RESULTS.md. Its ratios: the best of PyTorch's times to ours, and ours to the floor."""
        times = self.times_us
        decimals = 1 if max(times.values()) < 100 else 0
        us = {name: f"{value:.{decimals}f}" for name, value in times.items()}
        plain = min(times[name] for name in ("PyTorch", "PyTorch half") if name in times)
        sizes = [self.op, self.width, self.tokens, f"{self.megabytes:.2f}", f"{1000 * self.gflop:.1f}"]  # fmt: skip
        ratios = [f"{plain / times['neap']:.1f}", f"{times['neap'] / times['floor']:.1f}"]
        also = ", ".join(f"{name} {us[name]}" for name in us if name not in NAMED)
        return [*sizes, *(us.get(name, "") for name in NAMED), *ratios, also]


class Bench:
    """Times contenders in turns, with cold caches."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.dtype = DTYPE[device.type]
        self.lines: list[Line] = []
        self._stopwatch = stopwatch(device, rounds)

    def line(self, op: str, width: int, tokens: int, num_bytes: float, flop: float, runs: Contenders) -> None:
        """Times `runs` and a floor of `num_bytes`, prints the line and adds it to `lines`."""
        times = self._stopwatch.times_us({"floor": self._stopwatch.floor(num_bytes), **runs})
        self.lines.append(Line(op, width, tokens, num_bytes / 1e6, flop / 1e9, times))
        row(*self.lines[-1].cells())


@dataclass(frozen=True)
class PlainDraws:
    """Drafts of an exit in plain PyTorch, as the engine made them before it had kernels.

    `project`: adapted states [N, D] -> draft logits [N, Vd]. `precision`: a context for every call.
    """

    confidence: ConfidenceHead
    project: Callable[[Tensor], Tensor]
    precision: Callable[[], AbstractContextManager[object]] = nullcontext

    def halved(self, rows: Tensor) -> "PlainDraws":
        """With float16 copies of the weights and of `rows` [Vd, D], and float16 products: PyTorch's best case on a
        GPU."""
        small = rows.half()
        return PlainDraws(
            deepcopy(self.confidence).half(),
            lambda states: F.linear(states.half(), small),
            partial(torch.autocast, rows.device.type, torch.float16, cache_enabled=False),
        )

    def draft_top(self, adapted: Tensor) -> object:
        """Adapted states [N, D] -> best tokens, two largest logits and log mass, as `draft_top` computes them."""
        with self.precision():
            logits = self.project(adapted)
            return logits.argmax(-1), torch.topk(logits, 2), logits.logsumexp(-1)

    def route(self, adapted: Tensor, place: Tensor, logits: Tensor) -> Tensor:
        """The confidence head alone -> probabilities [N]. `place` [N] int64 >= 1."""
        with self.precision():
            probability: Tensor = self.confidence(adapted, scalar_features(logits, place))
            return probability


def bench_draws(bench: Bench, width: int, tokens: int) -> None:
    """Times the draft vocabulary and the confidence head of an exit."""
    size, _ = SIZES[width]
    confidence = ConfidenceHead(width).requires_grad_(False)
    rows = torch.randn(size, width) / width**0.5
    ways = {"PyTorch": PlainDraws(confidence, Matmul(rows, None))}
    if bench.on_gpu:
        ways["PyTorch half"] = ways["PyTorch"].halved(rows)
    small, weights = rows.half(), confidence_weights(confidence)
    adapted = torch.randn(tokens, width)
    place, tickets = torch.ones(tokens, dtype=torch.int64), new_tickets(tokens, bench.device)
    top, _, log_mass = draft_top(adapted, small, None, 2)
    others = (top, log_mass, place, LOWEST, HIGHEST, tickets)
    bench.line("draft_top", width, tokens, 2 * small.numel(), 2 * small.numel() * tokens, {
        **{name: partial(way.draft_top, adapted) for name, way in ways.items()},
        "neap": partial(draft_top, adapted, small, None, 2),
        "neap float32": partial(draft_top, adapted, rows, None, 2),
    })  # fmt: skip
    num_hidden = weights.hidden.numel()
    bench.line("route", width, tokens, 2 * num_hidden, 2 * num_hidden * tokens, {
        **{name: partial(way.route, adapted, place, top) for name, way in ways.items()},
        "neap": partial(route, adapted, weights, *others),
    })  # fmt: skip


def bench_choices(bench: Bench, width: int, tokens: int) -> None:
    """Times choosing tokens from logits over the model's vocabulary."""
    logits = torch.randn(tokens, SIZES[width][1])
    bench.line("choose_greedy", width, tokens, logits.numel() * 4, 0,
               {"PyTorch": partial(logits.argmax, -1), "neap": partial(choose_greedy, logits)})  # fmt: skip
    if tokens > 1:
        return
    probabilities = logits.double().softmax(-1)
    uniforms = torch.rand(tokens, dtype=torch.float64)

    def drawn() -> object:
        total = probabilities[0].cumsum(-1)
        last = total[-1]
        # On a GPU the total stays on the device: reading it would synchronise, which a capture forbids.
        point = 0.7 * (last if bench.on_gpu else float(last))
        return torch.searchsorted(total, point, right=True), torch.searchsorted(total, last)

    bench.line("choose_sampled", width, 1, probabilities.numel() * 8, 0,
               {"PyTorch": drawn, "neap": partial(choose_sampled, probabilities, uniforms)})  # fmt: skip


def bench_head(bench: Bench, width: int, tokens: int) -> None:
    """Times greedy choices from states through a large head in Q8_0, its inputs rounded. On a CPU."""
    if bench.on_gpu:
        return
    inputs, size = LARGE_HEADS[width]
    blocks = torch.randint(256, (size, inputs // 32, 34), dtype=torch.uint8)
    blocks[..., 0], blocks[..., 1] = 0, 16  # small scales
    packed, states = ops.pack_blocks(blocks.flatten(1), "Q8_0", inputs), torch.randn(tokens, inputs)
    ops.round_inputs_(packed)
    product = partial(ops.packed_linear, states, packed, size)
    bench.line("choose_packed", inputs, tokens, packed.numel(), 2 * inputs * size * tokens, {
        "PyTorch": lambda: product().argmax(-1),
        "neap": partial(ops.choose_packed, states, packed, size),
        "by choose_greedy": lambda: choose_greedy(product()),
    })  # fmt: skip


def bench_paged(bench: Bench, width: int, tokens: int) -> None:
    """Times paged attention of one token of each of N sequences of CONTEXT positions, with blocks in random order in
    the pool. On a GPU: a CPU has no kernel."""
    if not bench.on_gpu:
        return
    heads, kv_heads, size = HEADS[width]
    num_blocks = CONTEXT // BLOCK_TOKENS

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(bench.dtype)

    q, (k, v) = random(tokens, heads, size), random(2, tokens, kv_heads, size).unbind()
    keys, values = random(2, tokens * num_blocks, kv_heads, BLOCK_TOKENS, size).unbind()
    block_tables = torch.randperm(tokens * num_blocks).view(tokens, num_blocks)
    table_indices, positions = torch.arange(tokens), torch.full((tokens,), CONTEXT - 1)

    def plain() -> object:
        k, v = (t[block_tables].transpose(1, 2).flatten(2, 3) for t in (keys, values))
        return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

    own = partial(paged_attention, q, k, v, keys, values, block_tables, table_indices, positions)
    moved = 2 * tokens * CONTEXT * kv_heads * size * keys.element_size()
    bench.line("paged_attention", width, tokens, moved, 4 * tokens * CONTEXT * heads * size,
               {"PyTorch": plain, "neap": own})  # fmt: skip


def exit_times_us(device: torch.device, tokens: Sequence[int], rounds: int = 20, width: int = 4096) -> dict[str, float]:
    """Microseconds of the draft vocabulary, the confidence head and choices."""
    bench = Bench(device, rounds)
    with torch.inference_mode(), device:
        for count in tokens:
            bench_draws(bench, width, count)
            bench_choices(bench, width, count)
    return {f"{line.op}, us, {line.tokens}": line.times_us["neap"] for line in bench.lines}


PARTS: tuple[Callable[[Bench, int, int], None], ...] = (bench_draws, bench_choices, bench_head, bench_paged)


def main() -> None:
    parser = make_parser(__doc__, model=False)
    add_device(parser)
    parser.add_argument("--tokens", type=int, nargs="+", help="1 2 4 8; 1 8 32 64 on a GPU")
    parser.add_argument("--widths", type=int, nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    options = parsed(parser)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if not runs_on(device.type):
        parser.error(f"neap's kernels are not built for {device}: make build-ops")
    print(described(device))
    if device.type == "cuda":
        print(f"a copy within memory: {copy_bytes_per_s('cuda') / 1e9:.0f} GB/s, read and written")
        torch.set_default_device("cuda")
    print(f"{ops.cpu_isa()}, {options.threads} threads; us")
    bench = Bench(device, options.rounds)
    head(*COLUMNS)
    with torch.inference_mode():
        for width in options.widths:
            for part in PARTS:
                for tokens in options.tokens or TOKENS[device.type]:
                    part(bench, width, tokens)


if __name__ == "__main__":
    main()
