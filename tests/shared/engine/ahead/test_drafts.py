"""Drafting on the device says what drafting on a CPU says, plans the likeliest drafts, and accepts what is right."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from shared.engine.ahead.graphs import ROW_SIZES, LearnedMirror, StepGraphs
from shared.engine.ahead.slots import RowOfStep, SlotMemory
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import PassCosts
from shared.ladder.confidence import Confidence
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.learned_ngrams import LearnedNgrams
from shared.ladder.ngram_table import MAX_ORDER, NgramTable, context_keys
from shared.ladder.proposers import Draft, exit_name
from shared.ladder.table_confidence import SIZES, TableConfidence
from shared.ladder.tables import SequenceTables, native_ladder
from shared.model.paged_runner import PagedRunner
from shared.model.sampling import uniform_at
from shared.ops import NO_TOKEN, slots
from shared.ops.drafting import DraftedChain, Step
from shared.ops.slots import MOST_ROWS, NO_DRAFTER, PLACES, Slot, learned_entries
from tests.paged import load_family, make_runner

VOCABULARY, WIDTH = 12, 60
ROW = np.dtype(
    {
        "names": ["num_tokens", "num_drafted", "num_verified", "first", "num_new", "choices", "drafts", "reaches"],
        "formats": ["i8", "i4", "i4", "i4", "i4", ("i4", PLACES + 1), ("i4", PLACES), ("f8", PLACES)],
        "offsets": [0, 8, 12, 16, 20, 24, 24 + 4 * (PLACES + 1), 96],
        "itemsize": slots.row_bytes(),
    }
)
EXIT = exit_name(0)


@pytest.fixture(scope="module")
def runner() -> PagedRunner:
    return make_runner(load_family("llama"))


def random_confidence(draw: random.Random) -> TableConfidence:
    return TableConfidence(draw.uniform(-1, 3), [[draw.uniform(-1, 1) for _ in range(size)] for size in SIZES])


def random_table(draw: random.Random) -> NgramTable:
    orders = []
    for order in range(1, MAX_ORDER + 1):
        tokens = np.array(draw.choices(range(VOCABULARY), k=30), dtype=np.uint64)
        keys = np.unique(context_keys(tokens, order)).astype(np.int64)
        columns = [[draw.randrange(most) for _ in keys] for most in (VOCABULARY, 255, 256)]
        orders.append((keys, *(np.array(column, dtype=np.int64) for column in columns)))
    return NgramTable(orders)  # type: ignore[arg-type]


@dataclass
class Side:
    """Requests with one router, for both ways of drafting. `exits`: what the head says at each place of each row."""

    native: object
    sequences: list[SequenceTables]
    tokens: list[list[int]]
    confidences: list[Confidence]
    learned: LearnedNgrams
    salts: list[int]
    exits: list[list[tuple[int, float]]]
    ladder: Ladder


def random_side(runner: PagedRunner, seed: int, num_rows: int, *, has_exit: bool) -> Side:
    draw = random.Random(seed)
    ladder = Ladder(
        ModelIdentity.of(runner.loaded),
        random_confidence(draw) if draw.random() < 0.9 else None,
        random_table(draw),
        random_confidence(draw) if draw.random() < 0.9 else None,
    )
    costs = (1.0,) * (PLACES + 1)
    exits = [(0, 1e3, 0.0, 0.0, 0.0, 1)] if has_exit else []
    # So much agreement that the exit is asked at every place.
    native = native_ladder(ladder, VOCABULARY, costs, (), exits)
    learned = LearnedNgrams(1 << 12)
    clients = [learned.of(name) for name in "ab"]
    sequences, tokens, confidences, salts = [], [], [], []
    for _ in range(num_rows):
        client = draw.choice(clients)
        for _ in range(draw.randrange(4)):
            client.learn(draw.choices(range(VOCABULARY), k=20), 0)
        confidence = Confidence(DEFAULT_WEIGHTS, (EXIT,) if has_exit else ())
        for _ in range(40):
            drafts = [Draft(draw.randrange(3), draw.random(), "prompt-lookup", 0)]
            drafts += [Draft(draw.randrange(3), draw.random(), EXIT, 0)] if has_exit else []
            confidence.record([drafts], [draw.randrange(3)])
        sequence = SequenceTables(native, confidence, client)
        # Few tokens, so that contexts come again, and some of which nothing is known.
        row = draw.choices(range(draw.choice([2, 4, VOCABULARY])), k=draw.randrange(1, WIDTH))
        sequence.append(row)
        sequences.append(sequence)
        tokens.append(row)
        confidences.append(confidence)
        salts.append(client.salt)
    said = [
        [(draw.randrange(VOCABULARY), float(np.float32(draw.choice([0.0, draw.random()])))) for _ in range(PLACES)]
        for _ in range(num_rows)
    ]
    return Side(native, sequences, tokens, confidences, learned, salts, said, ladder)


def drafted_on_cpu(side: Side, rooms: list[int]) -> list[DraftedChain]:
    step, count = Step(), len(side.sequences)
    addresses = [sequence.handle.address for sequence in side.sequences]
    step.begin(addresses, rooms, [0] * count, [True] * count, count, keys_s=[0.0] * count)
    while True:
        _, asked = step.advance()
        if not asked:
            return step.read()
        said = [side.exits[one.row][len(one.drafts)] for one in asked]
        tokens, probabilities = zip(*said, strict=True)
        step.give(
            torch.tensor(tokens)[:, None],
            torch.tensor(probabilities, dtype=torch.float64)[:, None],
            torch.ones(len(asked), dtype=torch.int64),
        )


def filled(memory: SlotMemory, side: Side, rooms: list[int], size: int, *, has_states: bool = True) -> None:
    """Puts all requests on the device, in slots from the last one on, and begins a step."""
    states = torch.zeros(memory.states.shape[1:]) if has_states else None
    rows = []
    for row, (tokens, salt) in enumerate(zip(side.tokens, side.salts, strict=True)):
        number = MOST_ROWS - 1 - row
        memory.fill(number, Slot(len(tokens), rooms[row] + 1, salt, 1), tokens, states)
        handle = side.confidences[row].handle
        rows.append(RowOfStep(number, 7 + row, 0, handle.address.value))
    memory.send(rows, (), size)


def draft_on_device(memory: SlotMemory, side: Side, args, *, has_exit: bool) -> None:
    mirror = LearnedMirror(side.learned, torch.device("cpu"))
    columns = side.ladder.ngrams.columns if side.ladder.ngrams and side.ladder.ngram_confidence else []
    tensors = [[torch.from_numpy(part.view("u1")) for part in column] for column in columns]
    outputs = (memory.exit_tokens, memory.exit_probabilities) if has_exit else None
    drafting = slots.proposers(side.native, 0, tensors, mirror.entries, outputs)
    slots.begin(memory.rows, args, 0)
    for place in range(PLACES):
        for row, said in enumerate(side.exits):
            memory.exit_tokens[row], memory.exit_probabilities[row] = said[place]
        slots.draft(memory.rows, args, drafting, len(side.tokens), place)


def rows_of(memory: SlotMemory, count: int):
    return np.frombuffer(memory.rows.numpy().tobytes(), ROW)[:count]


@pytest.mark.parametrize("has_exit", [False, True], ids=["tables", "tables and an exit"])
def test_the_device_drafts_what_a_cpu_drafts(runner: PagedRunner, has_exit: bool) -> None:
    num_drafted = 0
    with torch.inference_mode():
        memory = SlotMemory(runner)
        for seed in range(40):
            count = 1 + seed % 7
            side = random_side(runner, seed, count, has_exit=has_exit)
            rooms = [(seed + row) % (PLACES + 1) for row in range(count)]
            filled(memory, side, rooms, 16)
            draft_on_device(memory, side, memory.args[16], has_exit=has_exit)
            wanted = drafted_on_cpu(side, rooms)
            for row, chain in zip(rows_of(memory, count), wanted, strict=True):
                assert row["drafts"][: row["num_drafted"]].tolist() == chain.tokens
                num_drafted += len(chain.tokens)
    assert num_drafted > 150


@torch.inference_mode()
def test_drafting_is_timed_with_what_tables_draft(runner: PagedRunner) -> None:
    side = random_side(runner, 0, 1, has_exit=False)
    ladder = replace(side.ladder, lookup_confidence=TableConfidence(4.0, [[0.0] * size for size in SIZES]))
    graphs = StepGraphs(runner, None)
    drafts = graphs.drafts_of(Drafter(runner, PassCosts((1.0,) * (PLACES + 1)), ladder.bind(runner)))
    sizes = iter(ROW_SIZES)

    def seconds(work: Callable[[], object]) -> float:
        size = next(sizes)
        graphs.memory.rows.zero_()
        work()
        assert (rows_of(graphs.memory, MOST_ROWS)["num_drafted"] == PLACES).sum() == size
        return float(size)

    for _ in drafts.prepare(seconds):
        pass
    assert drafts.seconds == {size: float(size) for size in ROW_SIZES}
    # Nothing of it is left for the next step.
    graphs.memory.rows.zero_()
    drafts.replay(1)
    assert not graphs.memory.rows.any()


def test_a_head_says_nothing_of_a_request_whose_states_are_unknown(runner: PagedRunner) -> None:
    with torch.inference_mode():
        memory = SlotMemory(runner)
        side = random_side(runner, 3, 4, has_exit=True)
        filled(memory, side, [PLACES] * 4, 16, has_states=False)
        draft_on_device(memory, side, memory.args[16], has_exit=True)
        found = rows_of(memory, 4)["drafts"].copy(), rows_of(memory, 4)["num_drafted"].copy()
        filled(memory, side, [PLACES] * 4, 16, has_states=False)
        draft_on_device(memory, side, memory.args[16], has_exit=False)
        for row in range(4):
            count = found[1][row]
            assert count == rows_of(memory, 4)["num_drafted"][row]
            assert found[0][row][:count].tolist() == rows_of(memory, 4)["drafts"][row][:count].tolist()


def test_changes_of_a_learned_table_reach_the_device() -> None:
    table = LearnedNgrams(1 << 12)
    client = table.of("a")
    client.learn([1, 2, 3, 4], 0)
    mirror = LearnedMirror(table, torch.device("cpu"))
    for step in range(30):
        client.learn([step, 2, step + 1, step % 3, 9], 0)
        assert not torch.equal(mirror.entries, learned_entries(table.handle))
        mirror.update()
        assert torch.equal(mirror.entries, learned_entries(table.handle))
    # More than are noted, as where nothing is drafted for a long time.
    client.learn([step * step % 97 for step in range(20_000)], 0)
    mirror.update()
    assert torch.equal(mirror.entries, learned_entries(table.handle))


@pytest.mark.parametrize("seed", range(60))
def test_a_pass_has_the_likeliest_drafts_of_all(runner: PagedRunner, seed: int) -> None:
    draw = random.Random(seed)
    count, size = draw.choice([1, 3, 12]), draw.choice([16, 32, 256])
    num_others = draw.randrange(size - count + 1) if draw.random() < 0.5 else 0
    with torch.inference_mode():
        memory = SlotMemory(runner)
        rows = []
        closed = {row for row in range(count) if draw.random() < 0.2}
        drafters = [draw.choice([0, NO_DRAFTER]) for _ in range(count)]
        lengths = [draw.randrange(1, 40) for _ in range(count)]
        for row in range(count):
            memory.fill(row, Slot(lengths[row], 9, 0, row not in closed), [row + 1] * lengths[row], None)
            rows.append(RowOfStep(row, 100 + row, drafters[row], 0))
        others = [(50, 200, place) for place in range(num_others)]
        memory.send(rows, others, size)
        slots.begin(memory.rows, memory.args[size], 0)
        of_rows = np.frombuffer(memory.rows.numpy(), ROW)
        reaches: list[tuple[float, int, int]] = []
        for row in range(count):
            if row in closed or drafters[row] == NO_DRAFTER:
                continue
            reach = 1.0
            of_rows["num_drafted"][row] = num_drafted = draw.randrange(PLACES + 1)
            for place in range(num_drafted):
                reach *= draw.choice([0.5, 0.75, 1.0])
                of_rows["reaches"][row][place], of_rows["drafts"][row][place] = reach, 10 + place
                reaches.append((-reach, row, place))
        slots.plan(memory.rows, memory.args[size])
    num_open = count - len(closed)
    room = size - num_others - num_open
    taken = sorted(reaches)[:room]
    least = 0.0 if len(reaches) <= room else -taken[-1][0] if taken else math.inf
    tokens = runner.token_buffer(size).stacked
    first = num_others
    for row in range(count):
        verified = int(of_rows["num_verified"][row])
        if row in closed:
            continue
        mine = [-reach for reach, of_row, _ in reaches if of_row == row]
        assert sum(reach > least for reach in mine) <= verified <= sum(reach >= least for reach in mine)
        assert of_rows["first"][row] == first
        expected = [row + 1, *(10 + place for place in range(verified))]
        assert tokens[0, first : first + 1 + verified].tolist() == expected
        assert (tokens[1, first : first + 1 + verified] == 100 + row).all()
        places = list(range(lengths[row] - 1, lengths[row] + verified))
        assert tokens[2, first : first + 1 + verified].tolist() == places
        first += 1 + verified
    assert sum(int(of_rows["num_verified"][row]) for row in range(count) if row not in closed) == len(taken)
    assert tokens[:3, :num_others].T.tolist() == [list(other) for other in others]
    assert (tokens[2, first:] == -1).all()
    assert (tokens[3] == tokens[2].clamp_min(0)).all()
    assert memory.logit_rows[: first - num_others].tolist() == list(range(num_others, first))
    assert not memory.drawing[0, first - num_others :].any()


def test_drawn_tokens_have_the_uniform_numbers_of_their_positions(runner: PagedRunner) -> None:
    with torch.inference_mode():
        memory = SlotMemory(runner)
        slot = Slot(5, 9, 0, 1, temperature=0.5, least_share=0.25, seed=2**64 - 3)
        memory.fill(0, Slot(3, 9, 0, 1), [1, 1, 1], None)
        memory.fill(1, slot, [2] * 5, None)
        rows = [RowOfStep(number, 0, 0, 0) for number in (0, 1)]
        memory.send(rows, [(1, 0, 0)], 16)
        slots.begin(memory.rows, memory.args[16], 0)
        of_rows = np.frombuffer(memory.rows.numpy(), ROW)
        of_rows["num_drafted"][1] = 2
        of_rows["reaches"][1][:2] = 0.5
        slots.plan(memory.rows, memory.args[16])
    numbers = [uniform_at(slot.seed, position) for position in (5, 6, 7)]
    assert memory.drawing[:, :5].tolist() == [[0, *[0.5] * 3, 0], [0, *[0.25] * 3, 0], [0, *numbers, 0]]


ENDS = (7, 9)


@pytest.mark.parametrize(
    ("chosen", "drafts", "num_left", "new", "is_open"),
    [
        ([5], [], 9, [5], True),
        ([5, 6, 8], [5, 6], 9, [5, 6, 8], True),
        ([5, 6, 8], [5, 1], 9, [5, 6], True),
        ([4, 6, 8], [5, 1], 9, [4], True),
        ([5, 7, 8], [5, 7], 9, [5, 7], False),
        ([5, 6, 8], [5, 6], 3, [5, 6, 8], False),
        ([5, 6, 8], [5, 6], 2, [5, 6], False),
        ([5, 6, 8], [5, 6], 1, [5], False),
        ([9], [], 9, [9], False),
        ([NO_TOKEN, 3], [5], 9, [NO_TOKEN], False),
        ([5, NO_TOKEN], [5], 9, [5, NO_TOKEN], False),
    ],
)
def test_what_is_accepted(runner: PagedRunner, chosen, drafts, num_left, new, is_open) -> None:
    """Beside another request, after two tokens of a prompt."""
    with torch.inference_mode():
        memory = SlotMemory(runner)
        slot = Slot(2, num_left, 0, 1, 0, len(ENDS))
        slot.ends[: len(ENDS)] = ENDS
        memory.fill(4, slot, [3, 3], None)
        memory.fill(5, Slot(2, 9, 0, 1), [3, 3], None)
        rows = [RowOfStep(number, 0, 0, 0) for number in (5, 4)]
        memory.send(rows, [(1, 0, 0), (1, 0, 1)], 16)
        args = memory.args[16]
        slots.begin(memory.rows, args, 0)
        of_rows = np.frombuffer(memory.rows.numpy(), ROW)
        of_rows["num_drafted"][1] = len(drafts)
        of_rows["drafts"][1][: len(drafts)] = drafts
        of_rows["reaches"][1][: len(drafts)] = 0.5
        slots.plan(memory.rows, args)
        memory.chosen[: 1 + len(chosen)] = torch.tensor([2, *chosen])
        slots.accept(memory.rows, args)
        after = Slot.from_buffer_copy(memory._slots[4].numpy().tobytes())
        assert of_rows["choices"][1][: of_rows["num_new"][1]].tolist() == new
        assert (after.num_tokens, after.num_left, bool(after.is_open)) == (2 + len(new), num_left - len(new), is_open)
        assert memory._tokens[4, 2 : 2 + len(new)].tolist() == new
        assert memory.state_rows[:2].tolist() == [2, 2 + len(new)]
        assert memory.state_slots[:3].tolist() == [5, 4, MOST_ROWS]
        # The next step has its new last token, or nothing of an answer that has ended.
        memory.send(rows, (), 16)
        slots.begin(memory.rows, args, 0)
        slots.plan(memory.rows, args)
        tokens = runner.token_buffer(16).stacked
        wanted = [2, new[-1]] if is_open else [2]
        assert tokens[0, : len(wanted)].tolist() == wanted
        assert tokens[2, len(wanted) :].tolist() == [-1] * (16 - len(wanted))
