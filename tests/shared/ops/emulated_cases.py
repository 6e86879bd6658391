"""Calls of the kernels on the emulator and their expected results.
Each check runs its calls in every order of warps."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shared.engine.ahead.slots import RowOfStep, SlotMemory
from shared.ladder.confidence import Confidence
from shared.ladder.joint_weights import CASES, DEFAULT_WEIGHTS
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.learned_ngrams import LearnedNgrams
from shared.ladder.ngram_table import MAX_ORDER, NgramTable, context_keys
from shared.ladder.table_confidence import SIZES, TableConfidence
from shared.ladder.tables import native_ladder
from shared.ops import reference, slots
from shared.ops.slots import MOST_ROWS, PLACES, Slot, learned_entries
from tests.shared.ops.emulation import CODES, Call, blank, raw, run

SEEDS = (0, 1, 2)  # ascending, descending and random order of warps and blocks
CLOSE = {"atol": 5e-5, "rtol": 5e-4}
TIGHT = {"atol": 1e-5, "rtol": 1e-5}  # half of a token's float16 numbers would not do
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-3


def seeded() -> None:
    torch.manual_seed(5)


def check_draft_top(program: Path) -> None:
    """Whole numbers have many ties; of others, a token's answers have the same bits beside all others and alone."""
    seeded()
    drawn: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = []
    for tokens, columns, size, k, dtype in [
        (1, 12, 70, 2, torch.float16),
        (9, 8, 66, 3, torch.float32),
        (2, 5, 10, 8, torch.bfloat16),
        (3, 8, 63, 2, torch.float16),
        (2, 8, 64, 8, torch.float16),
        (65, 40, 65, 2, torch.float16),
    ]:
        x, rows = (torch.randint(-2, 3, (tokens, columns)).float(), torch.randint(-2, 3, (size, columns)).to(dtype))
        drawn.append((x, rows, torch.randint(0, 2, (size,)).float(), k))
    x, rows, bias = torch.randn(17, 264), torch.randn(66, 264).half(), torch.randn(66)
    x *= torch.logspace(-4, 2, 17)[:, None]
    drawn += [(part.contiguous(), rows, bias, 2) for count in (1, 8, 9, 17) for part in [x[17 - count :]]]
    x, rows, bias = x.clone(), rows.clone(), bias.clone()
    x[3, 263], x[8, 0], x[16, 200], rows[0, 7], rows[65, 9], bias[4] = (
        float("nan"), float("inf"), -7e4, float("inf"), float("nan"), float("nan"),
    )  # fmt: skip
    drawn.append((x, rows, bias, 4))
    found = [_draft_top(program, *each) for each in drawn]
    *_, together, strange = found
    for count, alone in zip((1, 8, 9), found[-5:], strict=False):
        for part, whole in zip(alone, together, strict=True):
            assert torch.equal(part, whole[17 - count :])
    values, indices, log_mass = strange
    lost = torch.tensor([3, 8, 16])
    assert values[lost].isneginf().all()
    assert not indices[lost].any()
    assert log_mass.isnan().all()
    assert (indices != 65).all()
    assert (indices != 4).all()


def _draft_top(program: Path, x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor, k: int) -> list[torch.Tensor]:
    """The largest, their places and the log mass, which are the reference's in every order of warps."""
    tokens, (size, columns) = len(x), rows.shape
    blocks = (size + 63) // 64
    calls = []
    for seed in SEEDS:
        scratch = (blank(blocks, tokens, k), blank(blocks, tokens, k, dtype=torch.int32), blank(blocks, tokens, 2))
        answers = (blank(tokens, k), blank(tokens, k, dtype=torch.int64), blank(tokens))
        numbers = (tokens, CODES[rows.dtype], size, columns, k)
        calls.append(Call("draft_top", numbers, (x, rows, bias, *scratch, *answers), seed))
    run(program, calls)
    sound = bool(x.isfinite().all() and rows.isfinite().all())
    expected, places, mass = reference.draft_top(x, rows, bias, k)
    for call in calls:
        values, indices, log_mass = found = [buffer for buffer in call.buffers[-3:] if buffer is not None]
        for part, first in zip(found, calls[0].buffers[-3:], strict=True):
            assert first is not None
            assert torch.equal(raw(part), raw(first))
        if sound:
            torch.testing.assert_close(values, expected, **TIGHT)
            torch.testing.assert_close(log_mass, mass, **TIGHT)
            assert torch.equal(indices, places)
    return found


def check_route(program: Path) -> None:
    """A token's probability has the same bits alone, where a block takes one token, and beside others."""
    seeded()
    for tokens, columns, width, k, dtype, mixed in [
        (9, 2064, 9, 2, torch.float16, True),
        (11, 10, 13, 1, torch.float32, False),
        (8, 264, 4, 2, torch.float32, False),
        (140, 4, 3, 2, torch.bfloat16, False),
    ]:
        x = torch.randn(tokens, columns).to(torch.float32 if mixed else dtype)
        hidden = (torch.randn(width, columns) / columns**0.5).to(dtype)
        bias, output, skip = torch.randn(width), torch.randn(width), torch.randn(3)
        features, top = torch.randn(3, width), torch.randn(tokens, k)
        log_mass, distance = torch.randn(tokens) + 4, torch.randint(1, 5, (tokens,))
        weights = (hidden, bias, output, features, skip)
        expected = reference.route(x, *weights, top, log_mass, distance, 0.1, EPS, 0.01, 0.99)
        calls, shares = [], [(seed, 0, tokens) for seed in SEEDS] + [(0, 3, 4), (0, 1, 3)]
        for seed, first, last in shares:
            count = last - first
            numbers = (count, CODES[x.dtype], columns, CODES[dtype], width, columns, k, 0.1, EPS, 0.01, 0.99)
            own = [part[first:last].clone() for part in (x, top, log_mass, distance)]
            scratch = (blank(count, (width + 3) // 4), torch.zeros((count + 7) // 8, dtype=torch.int32))
            calls.append(Call("route", numbers, (own[0], *weights, *own[1:], *scratch, blank(count)), seed))
        run(program, calls)
        for call, (_, first, last) in zip(calls, shares, strict=True):
            left, probability = call.buffers[-2:]
            torch.testing.assert_close(probability, expected[first:last], **CLOSE)
            assert calls[0].buffers[-1] is not None
            assert torch.equal(probability, calls[0].buffers[-1][first:last])
            assert not left.any()


def check_choose(program: Path) -> None:
    seeded()
    for vocabulary, dtype in [
        *zip((300, 4097, 2049, 2048), (*FLOATS, torch.float64), strict=True),
        (1, torch.float64),
        (6143, torch.float64),
        (4096, torch.float16),
    ]:
        rows = 6
        draws = torch.rand(rows, dtype=torch.float64)
        draws[:2] = torch.tensor([0.0, 1 - 2**-53])
        logits = torch.randint(-3, 4, (rows, vocabulary)).to(dtype)
        target = torch.randn(rows, vocabulary).mul(2).softmax(-1).to(dtype)
        if dtype == torch.float64:  # whole numbers, as of a request, most of them zeros
            target = (target * 2**40).round_().mul_(torch.rand(rows, vocabulary) < 0.01)
            target[:, 0] += 1
        logits[5] = float("-inf")
        if vocabulary > 7:  # the rest of row 0, and of pieces of row 1, weighs nothing
            target[0, 6:], target[1, :5], target[1, vocabulary // 2 :] = 0, 0, 0
            target[2] = 0
            logits[3, 1], logits[4, 5], logits[1, vocabulary - 1] = float("nan"), float("inf"), 9
            target[3, 1], target[4, 5] = float("nan"), float("inf")
        # The reference's argmax need not take the first of equal numbers.
        tops = [int((row == row.max()).nonzero()[0]) if row.max().isfinite() else -1 for row in logits.double()]
        wanted = [(logits, None, torch.tensor(tops)), (target, draws, reference.choose_sampled(target, draws))]
        pieces = (vocabulary + 2047) // 2048
        calls = []
        for scores, uniforms, _ in wanted:
            for seed in SEEDS:
                scratch = blank(rows, pieces, 2, dtype=torch.float64)
                buffers = (scores, uniforms, scratch, blank(rows, dtype=torch.int64))
                calls.append(Call("choose", (CODES[dtype], rows, vocabulary), buffers, seed))
        run(program, calls)
        for index, call in enumerate(calls):
            assert torch.equal(call.buffers[-1], wanted[index // len(SEEDS)][-1])


def check_slots(program: Path) -> None:
    """What a step drafts, plans and accepts for some requests: the bits of the CPU."""
    draw, count, vocabulary, size = random.Random(2), 5, 6, 16
    device = SimpleNamespace(stacked=torch.zeros(5, size, dtype=torch.int64))
    loaded = SimpleNamespace(
        device=torch.device("cpu"), context_length=200, hidden_size=4, model=SimpleNamespace(dtype=torch.float32)
    )
    runner = SimpleNamespace(loaded=loaded, token_buffer=lambda _: device, pass_sizes=(size,))
    with torch.inference_mode():
        memory = SlotMemory(runner)  # type: ignore[arg-type]
        lookup, ngrams = ([draw.uniform(-1, 2) for _ in range(33)] for _ in range(2))
        weights = [number for case in CASES for number in DEFAULT_WEIGHTS.of(case)]
        table = NgramTable([_random_order(draw, order, vocabulary) for order in range(1, MAX_ORDER + 1)])
        columns = [[torch.from_numpy(part.view("u1")) for part in column] for column in table.columns]
        learned = LearnedNgrams(1 << 10)
        client = learned.of("a")
        client.learn(draw.choices(range(vocabulary), k=60), 0)
        native = native_ladder(
            Ladder(ModelIdentity("", "", "", 1, 4, vocabulary), _confidence(lookup), table, _confidence(ngrams)),
            vocabulary,
        )
        rows = []
        for row in range(count):
            tokens = draw.choices(range(vocabulary), k=draw.choice([1, 40, 190]))
            slot = Slot(len(tokens), 9, client.salt, row != 3, temperature=row % 2, seed=row)
            memory.fill(row, slot, tokens, torch.zeros(3, 4) if row % 2 else None)
            ratios = Confidence()
            rows.append(RowOfStep(row, row, 0, ratios.handle.address.value))
        memory.send(rows, [(1, 9, 0), (2, 9, 1)], size)
        memory.exit_tokens.copy_(torch.tensor(draw.choices(range(vocabulary), k=MOST_ROWS)))
        memory.exit_probabilities.fill_(0.75)
        memory.chosen.copy_(torch.tensor(draw.choices(range(vocabulary), k=MOST_ROWS)))
        before = [
            each.clone()
            for each in (
                memory._control, memory._slots, memory._tokens, memory.rows, memory.newest, device.stacked,
                memory.logit_rows, memory.drawing, memory.chosen, memory.state_rows, memory.state_slots,
            )
        ]  # fmt: skip
        entries = learned_entries(learned.handle).clone()
        drafting = slots.proposers(native, 0, columns, entries, (memory.exit_tokens, memory.exit_probabilities))
        args = memory.args[size]
        slots.begin(memory.rows, args, 0)
        for place in range(PLACES):
            slots.draft(memory.rows, args, drafting, count, place)
        slots.plan(memory.rows, args)
        slots.accept(memory.rows, args)
    assert int((device.stacked[2] >= 0).sum()) - 2 - (count - 1) > 0  # some drafts are in the pass
    numbers = (memory._tokens.shape[1], count, vocabulary, *map(len, table.columns[0]), len(entries) // 4)
    known = [torch.tensor(each, dtype=torch.float64) for each in (lookup, ngrams, weights)]
    orders = [column[order].clone() for order in range(MAX_ORDER) for column in columns]
    heads = [memory.exit_tokens.clone(), memory.exit_probabilities.clone()]
    calls = [
        Call("slots", numbers, [*(each.clone() for each in before), *known, *orders, entries, *heads], seed)
        for seed in SEEDS
    ]
    run(program, calls)
    expected = [
        memory._control, memory._slots, memory._tokens, memory.rows, memory.newest, device.stacked,
        memory.logit_rows, memory.drawing, memory.chosen, memory.state_rows, memory.state_slots,
    ]  # fmt: skip
    for call in calls:
        for found, wanted in zip(call.buffers, expected, strict=False):
            assert found is not None
            assert torch.equal(raw(found), raw(wanted))


def _random_order(draw: random.Random, order: int, vocabulary: int) -> Any:
    tokens = np.array(draw.choices(range(vocabulary), k=40), dtype=np.uint64)
    keys = np.unique(context_keys(tokens, order))
    return keys, *(np.array([draw.randrange(most) for _ in keys]) for most in (vocabulary, 255, 256))


def _confidence(numbers: list[float]) -> TableConfidence:
    parts = iter(numbers[1:])
    return TableConfidence(numbers[0], [[next(parts) for _ in range(size)] for size in SIZES])


CHECKS: dict[str, Callable[[Path], None]] = {
    "draft_top": check_draft_top,
    "route": check_route,
    "choose": check_choose,
    "slots": check_slots,
}
