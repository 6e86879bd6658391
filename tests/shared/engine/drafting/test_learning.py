"""What drafting learns while it serves: what asking an exit gains, how long its calls take, what keys take."""

import random

import pytest
import torch

from shared.engine.drafting.drafter import MOST_SLOWNESS, Drafter, KeyTime
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.ladder.confidence import Confidence
from shared.ladder.tables import SequenceTables, native_ladder
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.ops.drafting import Step
from tests.families import build_family
from tests.random_ladder import random_ladder

RIGHT, WRONG = 3, 4


def asked_in(num_steps: int, tables: SequenceTables, step: Step, token: int) -> int:
    """How often the exit is asked in so many steps of one draft, if it always drafts `token`."""
    num_asked = 0
    for _ in range(num_steps):
        step.begin([tables.handle.address], [1], [0], [False], 1)
        _, asked = step.advance()
        if asked:
            num_asked += 1
            one = torch.ones(1, dtype=torch.int64)
            step.give(torch.tensor([[token]]), torch.tensor([[0.6]], dtype=torch.float64), one)
            assert step.advance()[1] == []
        [chain] = step.read()
        tables.record([RIGHT, 9] if chain.tokens == [RIGHT] else [RIGHT])
    return num_asked


def test_an_exit_that_gains_nothing_is_asked_seldom_and_comes_back() -> None:
    ladder = native_ladder(None, 10, (1.0,) * 9, (), [(0, 0.5, 0.05, 0.0, 0.0, 1)])
    confidence, step = Confidence(exit_names=("depth-0",)), Step()
    tables = SequenceTables(ladder, confidence)
    assert asked_in(20, tables, step, WRONG) == 20
    assert asked_in(400, tables, step, WRONG) < 200
    late = asked_in(200, tables, step, WRONG)
    assert 0 < late < 60, "now and then it is tried"
    assert asked_in(2000, tables, step, RIGHT) > 1500, "and asked again once it is right"


@pytest.mark.parametrize("width", [None, 3])
def test_what_keys_take_is_found(width: int | None) -> None:
    draw, time = random.Random(1), KeyTime()
    for _ in range(400):
        parts = [(draw.randrange(10, 2000), width or draw.randrange(1, 8)) for _ in range(draw.randrange(1, 4))]
        extra_s = sum(keys * (2e-6 + 1e-6 * tokens) for keys, tokens in parts)
        time.record(extra_s * draw.uniform(0.9, 1.1), parts)
    extra_s, keys_s = time.of([1000, 500])
    if width is None:
        assert extra_s == pytest.approx(1500 * 3e-6, rel=0.05)
        assert keys_s == pytest.approx([1e-3, 0.5e-3], rel=0.1)
    else:  # such passes tell only what all their tokens take together
        assert keys_s[0] * width == pytest.approx(1000 * (2e-6 + width * 1e-6), rel=0.05)
        assert extra_s == pytest.approx(sum(keys_s))


def test_passes_that_are_faster_than_measured_take_nothing_off() -> None:
    time = KeyTime()
    for number in range(50):
        time.record(-1e-3, [(100 + number, 1 + number % 3)])
    assert time.of([1000]) == (0.0, [0.0])


def test_nothing_is_known_without_keys() -> None:
    time = KeyTime()
    time.record(1e-3, [(0, 1)])
    assert time.of([5, 0]) == (0.0, [0.0, 0.0])


def test_an_exit_whose_calls_take_longer_than_measured_is_asked_no_more() -> None:
    torch.manual_seed(0)
    runner = ContiguousRunner(wrap_model(build_family("llama"), accelerate=True))
    costs = PassCosts((1.0,) * 9, exits=(ExitCost(0.2, 0.0),))
    drafter = Drafter(runner, costs, random_ladder(runner.loaded, 1, (0,), agreement=0.5).bind(runner))
    tables = SequenceTables(drafter.native, Confidence(exit_names=("depth-0",)))
    step = Step()

    def is_asked() -> bool:
        step.begin([tables.handle.address], [1], [0], [False], 1)
        return bool(step.advance()[1])

    assert is_asked()
    for _ in range(100):
        drafter.record_call(0, 0.01, 1, 1)
    assert is_asked(), "calls are never taken to be faster than measured"
    for _ in range(100):
        drafter.record_call(0, 9.0, 1, 1)
    assert not is_asked()
    for _ in range(100):
        drafter.record_call(0, 0.2, 1, 1)
    assert is_asked()
    assert MOST_SLOWNESS > 2
