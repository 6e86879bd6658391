"""Calls of the kernels on the emulator and their expected results.
Each check runs its calls in every order of warps."""

from collections.abc import Callable
from pathlib import Path

import torch

from shared.ops import reference
from tests.shared.ops.emulation import CODES, Call, blank, run

SEEDS = (0, 1, 2)  # ascending, descending and random order of warps and blocks
CLOSE = {"atol": 5e-5, "rtol": 5e-4}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-3


def seeded() -> None:
    torch.manual_seed(5)


def check_draft_top(program: Path) -> None:
    seeded()
    for tokens, columns, size, k, dtype in [
        (1, 12, 70, 2, torch.float16),
        (9, 8, 66, 3, torch.float32),
        (2, 5, 10, 8, torch.bfloat16),
    ]:
        x, rows = (torch.randint(-2, 3, (tokens, columns)).float(), torch.randint(-2, 3, (size, columns)).to(dtype))
        bias = torch.randint(0, 2, (size,)).float()  # whole numbers: many ties
        expected, places, mass = reference.draft_top(x, rows, bias, k)
        blocks = (size + 31) // 32
        calls = []
        for seed in SEEDS:
            scratch = (blank(blocks, tokens, k), blank(blocks, tokens, k, dtype=torch.int32), blank(blocks, tokens, 2))
            answers = (blank(tokens, k), blank(tokens, k, dtype=torch.int64), blank(tokens))
            numbers = (tokens, CODES[dtype], size, columns, k)
            calls.append(Call("draft_top", numbers, (x, rows, bias, *scratch, *answers), seed))
        run(program, calls)
        for call in calls:
            values, indices, log_mass = call.buffers[-3:]
            torch.testing.assert_close(values, expected, **CLOSE)
            torch.testing.assert_close(log_mass, mass, **CLOSE)
            assert torch.equal(indices, places)


def check_route(program: Path) -> None:
    seeded()
    for tokens, columns, width, k, dtype, mixed in [
        (1, 16, 9, 2, torch.float16, True),
        (11, 10, 13, 1, torch.float32, False),
        (140, 4, 3, 2, torch.bfloat16, False),
    ]:
        x = torch.randn(tokens, columns).to(torch.float32 if mixed else dtype)
        hidden = torch.randn(width, columns).to(dtype)
        bias, output, skip = torch.randn(width), torch.randn(width), torch.randn(3)
        features, top = torch.randn(3, width), torch.randn(tokens, k)
        log_mass, distance = torch.randn(tokens) + 4, torch.randint(1, 5, (tokens,))
        weights = (hidden, bias, output, features, skip)
        expected = reference.route(x, *weights, top, log_mass, distance, 0.1, EPS, 0.01, 0.99)
        tickets = torch.zeros((tokens + 7) // 8, dtype=torch.int32)
        calls = []
        for seed in SEEDS:
            numbers = (tokens, CODES[x.dtype], columns, CODES[dtype], width, columns, k, 0.1, EPS, 0.01, 0.99)
            partial = blank(tokens, (width + 3) // 4)
            calls.append(
                Call(
                    "route",
                    numbers,
                    (x, *weights, top, log_mass, distance, partial, tickets.clone(), blank(tokens)),
                    seed,
                )
            )
        run(program, calls)
        for call in calls:
            left, probability = call.buffers[-2:]
            torch.testing.assert_close(probability, expected, **CLOSE)
            assert not left.any()


def check_choose(program: Path) -> None:
    seeded()
    for number, dtype in enumerate((*FLOATS, torch.float64)):
        rows, vocabulary = 5, (300, 7, 513, 900)[number]
        draws = torch.rand(rows, dtype=torch.float64)
        logits = torch.randint(-3, 4, (rows, vocabulary)).to(dtype)
        target = torch.randn(rows, vocabulary).mul(2).softmax(-1).to(dtype)
        # The reference's argmax need not take the first of equal numbers, so each row has a unique largest one.
        logits[torch.arange(rows), torch.tensor([0, 3, 5, 6, 2])] = 9
        logits[3, 1], logits[4, 5] = float("nan"), float("inf")
        target[3, 1], target[4, 5] = float("nan"), float("inf")
        wanted = [
            (logits, None, reference.choose_greedy(logits)),
            (target, draws, reference.choose_sampled(target, draws)),
        ]
        calls = []
        for scores, uniforms, _ in wanted:
            for seed in SEEDS:
                buffers = (scores, uniforms, blank(rows, dtype=torch.int64))
                calls.append(Call("choose", (CODES[dtype], rows, vocabulary), buffers, seed))
        run(program, calls)
        for index, call in enumerate(calls):
            assert torch.equal(call.buffers[-1], wanted[index // len(SEEDS)][-1])


CHECKS: dict[str, Callable[[Path], None]] = {"draft_top": check_draft_top, "route": check_route, "choose": check_choose}
