"""What every op is asked on a GPU: inputs on the CPU, the op, and its reference.
Two seeds give inputs of the same shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ops import choose_greedy, choose_sampled, reference
from shared.ops.blocks import LAYOUTS, Blocks, arranged, widened
from shared.ops.chains import ConfidenceWeights, draft_top, new_tickets, route
from shared.ops.paged import paged_attention
from shared.ops.products import blocks_linear, expert_linear, grouped, invariant_linear
from tests.shared.ops.drawn_blocks import drawn_blocks
from tests.shared.ops.paged_passes import CLOSE, drawn_pass

Inputs = list[Tensor | None]
Outputs = tuple[Tensor, ...]
EXACT = {"atol": 0.0, "rtol": 0.0}
SUMMED = {"atol": 1e-4, "rtol": 1e-3}  # float32 sums in another order


@dataclass(frozen=True)
class Case:
    """`run` and `expected` give the outputs and what they change of the inputs; floats must agree within `close`."""

    name: str
    inputs: Callable[[], Inputs]
    run: Callable[..., Outputs]
    expected: Callable[..., Outputs]
    close: dict[str, float]

    def seeded(self, seed: int) -> Inputs:
        torch.manual_seed(seed)
        return self.inputs()


def copied(inputs: Inputs, device: str) -> Inputs:
    """Dense views keep their strides."""
    return [None if t is None else t.clone().to(device) for t in inputs]


def _draft_top(tokens: int, width: int, size: int, k: int, dtype: torch.dtype) -> Case:
    def inputs() -> Inputs:
        # Whole numbers, whose sums have no rounding, and a bias of its own per row: no order hangs on the last bit.
        x = torch.randint(-2, 3, (tokens, width)).float()
        return [x, torch.randint(-2, 3, (size, width)).to(dtype), torch.randn(size)]

    def run(*tensors: Tensor) -> Outputs:
        return draft_top(*tensors, k)

    def expected(*tensors: Tensor) -> Outputs:
        return reference.draft_top(*tensors, k)

    return Case(f"draft_top {tokens}x{width}x{size} {dtype}", inputs, run, expected, SUMMED)


def _route(tokens: int, width: int, size: int, dtype: torch.dtype, mixed: bool) -> Case:
    limits = (0.01, 0.99)

    def inputs() -> Inputs:
        x = torch.randn(tokens, width).to(torch.float32 if mixed else dtype)
        hidden = (torch.randn(size, width) / width**0.5).to(dtype)
        vectors = (torch.randn(size), torch.randn(size), torch.randn(3, size), torch.randn(3))
        evidence = (torch.randn(tokens, 2), torch.randn(tokens) + 4, torch.randint(1, 6, (tokens,)))
        return [x, hidden, *vectors, *evidence, new_tickets(tokens)]

    def run(x: Tensor, hidden: Tensor, *others: Tensor) -> Outputs:
        *vectors, top, log_mass, distance, tickets = others
        weights = ConfidenceWeights(hidden, *vectors, shift=0.1, eps=1e-3)
        return route(x, weights, top, log_mass, distance, *limits, tickets), tickets

    def expected(*tensors: Tensor) -> Outputs:
        *others, tickets = tensors
        return reference.route(*others, 0.1, 1e-3, *limits), torch.zeros_like(tickets)

    return Case(f"route {tokens}x{width}x{size} {dtype}", inputs, run, expected, SUMMED)


def _choose(rows: int, vocabulary: int, dtype: torch.dtype) -> list[Case]:
    def greedy_inputs() -> Inputs:
        logits = torch.randn(rows, vocabulary)
        # Of equals, the reference takes any.
        logits[torch.arange(rows), torch.randint(0, vocabulary, (rows,))] = 9
        return [logits.to(dtype)]

    def sampled_inputs() -> Inputs:
        target = torch.randn(rows, vocabulary).mul(2).softmax(-1).to(dtype)
        return [target, torch.rand(rows, dtype=torch.float64)]

    def single(choose: Callable[..., Tensor]) -> Callable[..., Outputs]:
        return lambda *tensors: (choose(*tensors),)

    name = f"{rows}x{vocabulary} {dtype}"
    return [
        Case(f"choose_greedy {name}", greedy_inputs, single(choose_greedy), single(reference.choose_greedy), EXACT),
        Case(f"choose_sampled {name}", sampled_inputs, single(choose_sampled), single(reference.choose_sampled), EXACT),
    ]  # fmt: skip


def _paged(
    lengths: list[int],
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    softcap: float = 0.0,
    window: int = 0,
) -> Case:
    def inputs() -> Inputs:
        order = torch.randperm(len(lengths))  # the second time, other rows are the long ones
        shuffled = [lengths[i] for i in order]
        made = drawn_pass([2] * len(lengths), shuffled, 1, heads, widths, 16, dtype, transposed=True)
        return [*list(vars(made).values())[:8]]

    def run(*tensors: Tensor) -> Outputs:
        out = paged_attention(*tensors, 0.2, softcap, window)
        return out, tensors[3].nan_to_num(), tensors[4].nan_to_num()

    def expected(*tensors: Tensor) -> Outputs:
        out = reference.paged_attention(*tensors, 0.2, softcap, window)
        return out, tensors[3].nan_to_num(), tensors[4].nan_to_num()

    name = f"paged_attention {len(lengths)} rows to {max(lengths)}, {heads}x{widths} {dtype} {softcap} {window}"
    return Case(name, inputs, run, expected, CLOSE[dtype])


SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def _product(count: int, rows: int, width: int, dtype: torch.dtype, kind: str = "") -> Case:
    """`kind`: of GGUF's blocks, whose reference widens them all."""

    def inputs() -> Inputs:
        x, bias = torch.randn(count, width).to(dtype), torch.randn(rows).to(dtype)
        weight = (
            arranged(drawn_blocks(rows, width, kind), kind, width) if kind else [torch.randn(rows, width).to(dtype)]
        )
        return [x, bias, *weight]

    def run(x: Tensor, bias: Tensor, *weight: Tensor) -> Outputs:
        return (blocks_linear(x, Blocks(*weight), kind, bias) if kind else invariant_linear(x, weight[0], bias),)

    def expected(x: Tensor, bias: Tensor, *weight: Tensor) -> Outputs:
        wide = widened(Blocks(*weight), kind, width).to(dtype) if kind else weight[0]
        return (torch.nn.functional.linear(x.float(), wide.float(), bias.float()).to(dtype),)

    scale = width**0.5
    close = {"atol": scale * CLOSE[dtype]["atol"], "rtol": CLOSE[dtype]["rtol"]}
    return Case(f"product {kind} {count}x{rows}x{width} {dtype}", inputs, run, expected, close)


def _experts(count: int, experts: int, choices: int, dtype: torch.dtype, kind: str = "") -> Case:
    """Products of 256x512 of experts. The second time, other tokens choose what these chose."""
    rows, width = 256, 512

    def inputs() -> Inputs:
        index = torch.rand(count, experts).topk(choices).indices
        x, size = torch.randn(count, width).to(dtype), (experts * rows, width)
        return [
            x,
            index,
            *(arranged(drawn_blocks(*size, kind), kind, width) if kind else [torch.randn(size).to(dtype)]),
        ]

    def run(x: Tensor, index: Tensor, *held: Tensor) -> Outputs:
        own = held if kind else [held[0].view(experts, rows, width)]
        return (expert_linear(x, own, index, grouped(index, experts, 16), rows, kind),)

    def expected(x: Tensor, index: Tensor, *held: Tensor) -> Outputs:
        wide = (widened(Blocks(*held), kind, width).to(dtype) if kind else held[0]).view(experts, rows, width)
        return ((wide.float()[index.flatten()] @ x.float().repeat_interleave(choices, 0)[..., None])[..., 0].to(dtype),)

    close = {"atol": width**0.5 * CLOSE[dtype]["atol"], "rtol": CLOSE[dtype]["rtol"]}
    return Case(f"multiplies {kind} {count} of {experts} experts {dtype}", inputs, run, expected, close)


CASES: list[Case] = [
    *(_experts(count, 8, 2, dtype) for count in (1, 50) for dtype in (SINGLE, HALF, BRAIN)),
    *(_experts(count, 16, 4, BRAIN, kind) for count in (1, 50) for kind in LAYOUTS),
    *(_product(count, 512, 1024, dtype) for count in (1, 40, 300) for dtype in (SINGLE, HALF, BRAIN)),
    *(_product(count, 130, 1024, BRAIN, kind) for count in (2, 100) for kind in LAYOUTS),
    _draft_top(1, 64, 4587, 2, HALF),
    _draft_top(9, 33, 130, 8, SINGLE),
    _draft_top(4, 128, 1000, 3, BRAIN),
    _route(1, 576, 128, HALF, True),
    _route(70, 100, 33, SINGLE, False),
    _route(300, 64, 16, BRAIN, False),
    *_choose(6, 49152, SINGLE),
    *_choose(5, 1000, torch.float64),
    *_choose(4, 513, HALF),
    *_choose(4, 300, BRAIN),
    *(
        _paged([3, 700, 140, 0], heads, (width, width), dtype)
        for width in (64, 80, 96, 128, 256)
        for heads, dtype in (((1, 2), HALF), ((3, 2), BRAIN), ((8, 1), HALF))
    ),
    _paged([5000, 17], (4, 2), (128, 128), BRAIN),
    _paged([1, 300], (7, 2), (64, 64), HALF, 20.0, 128),
    _paged([40, 300], (2, 2), (20, 33), HALF),
    _paged([40, 300], (4, 2), (256, 256), SINGLE),
    _paged([40, 300], (71, 1), (64, 64), BRAIN, 0.0, 100),
    _paged([90] * 40, (4, 8), (128, 128), HALF),  # so many tokens that no piece is shared out
]
