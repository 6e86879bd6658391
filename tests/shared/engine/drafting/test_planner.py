"""How many drafts are verified and which sequences ask an exit: the native planner against all other choices."""

import random
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise, product
from math import prod
from operator import mul

import numpy as np
import pytest

from shared.engine.drafting.costs import smoothed
from shared.engine.drafting.pass_costs import ExitCost, PassCosts, call_gain_s
from shared.ladder.confidence import Confidence
from shared.ladder.tables import SequenceTables, native_ladder
from shared.ops.drafting import Step
from tests.scripted_tables import native_script

FLAT = PassCosts(verify=(1.0,) * 9)
STEEP = PassCosts(verify=tuple(float(n) for n in range(1, 10)))
STEP = PassCosts(verify=(1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0))
# Tokens per pass of a sequence without any.
USUAL = 1.5
MIN_SURVIVAL = 0.02
EXIT = ("depth-0",)


def begun(
    chains: Sequence[Sequence[float]],
    costs: PassCosts,
    fixed: Sequence[bool] = (),
    num_other_tokens: int = 0,
    agreement: float = 0.0,
    exit_cost: ExitCost | None = None,
    extra_s: float = 0.0,
    keys_s: Sequence[float] = (),
) -> tuple[Step, list[SequenceTables]]:
    """A step of sequences whose tables propose chains of these probabilities; and what must live as long as it."""
    exits = [(0, agreement, exit_cost.alone_s, exit_cost.each_more_s, 0.0, 1)] if exit_cost else []
    ladder = native_ladder(None, 10, costs.verify, costs.wide, exits)
    confidence = Confidence(exit_names=EXIT)

    def script(chain: Sequence[float]) -> object:
        return native_script(lambda drafted: (1, chain[len(drafted)]) if len(drafted) < len(chain) else None)

    tables = [SequenceTables(ladder, confidence, script=script(chain)) for chain in chains]
    step, count = Step(), len(chains)
    addresses, limits = [each.handle.address for each in tables], ([8] * count, [0] * count, fixed or [False] * count)
    step.begin(addresses, *limits, count, num_other_tokens, extra_s, keys_s)
    return step, tables


def planned(
    chains: Sequence[Sequence[float]], costs: PassCosts, fixed: Sequence[bool] = (), num_other_tokens: int = 0
) -> list[int]:
    step, _kept = begun(chains, costs, fixed, num_other_tokens)
    assert step.advance()[1] == []
    return step.plan()


def of_pass(costs: PassCosts, num_tokens: int) -> float:
    sizes = [*range(1, len(costs.verify) + 1), *(size for size, _ in costs.wide)]
    seconds = [*costs.verify, *(each for _, each in costs.wide)]
    if num_tokens <= sizes[-1]:
        return float(np.interp(num_tokens, sizes, seconds))
    low, high = ((1, seconds[0]), (sizes[-1], seconds[-1])) if not costs.wide else costs.wide[-2:]
    return low[1] + (high[1] - low[1]) * (num_tokens - low[0]) / (high[0] - low[0])


def rate(chains: Sequence[Sequence[float]], lengths: Sequence[int], costs: PassCosts, num_other_tokens: int) -> float:
    expected = sum(prod(chain[:n]) for chain, length in zip(chains, lengths, strict=True) for n in range(length + 1))
    return expected / of_pass(costs, len(chains) + sum(lengths) + num_other_tokens)


@pytest.mark.parametrize("costs", [FLAT, STEEP, STEP])
@pytest.mark.parametrize("chain", [[], [0.9] * 8, [0.5] * 8, [0.1] * 8, [0.9, 0.1, 0.9, 0.9], [0.99] * 8])
def test_the_length_is_the_best_of_all(chain: list[float], costs: PassCosts) -> None:
    [chosen] = planned([chain], costs)
    # What is hardly ever reached is not looked up.
    reached = sum(survival > MIN_SURVIVAL for survival in [1.0, *accumulate(chain, mul)][:-1])
    assert rate([chain], [chosen], costs, 0) == pytest.approx(
        max(rate([chain], [count], costs, 0) for count in range(reached + 1))
    )


def test_where_tokens_cost_as_much_as_passes_nothing_is_drafted() -> None:
    assert planned([[0.9] * 8], STEEP) == [0]


def test_a_step_in_the_cost_is_crossed_only_if_it_pays() -> None:
    assert planned([[0.9, 0.9, 0.9, 0.1, 0.1]], STEP) == [3]
    assert planned([[0.99] * 8], STEP) == [8]


@pytest.mark.parametrize("num_sequences", [1, 2, 8, 16])
def test_drafts_that_are_not_looked_up_would_not_have_been_verified(num_sequences: int) -> None:
    draw = random.Random(num_sequences)
    shorter = 0
    for _ in range(200):
        slope = draw.choice([0.01, 0.05, 0.2])
        costs = PassCosts(tuple(1.0 + slope * n for n in range(9)), wide=((64, 1.0 + slope * 63),))
        chains = [[draw.random() for _ in range(draw.randint(0, 8))] for _ in range(num_sequences)]
        step, _kept = begun(chains, costs)
        step.advance()
        found, lengths = step.read(), step.plan()
        shorter += any(len(one.tokens) < len(chain) for one, chain in zip(found, chains, strict=True))
        # The same chains, whole: whatever is added makes no better plan.
        for index, chain in enumerate(chains):
            if lengths[index] < len(chain):
                longer = [*lengths]
                longer[index] += 1
                assert rate(chains, longer, costs, 0) <= rate(chains, lengths, costs, 0) + 1e-9
    assert shorter > 50


@pytest.mark.parametrize("costs", [FLAT, STEEP, STEP, PassCosts((1.0, 1.2), wide=((3, 1.3), (6, 2.9)))])
@pytest.mark.parametrize("fixed", [(False, False), (True, False)])
def test_the_lengths_of_sequences_that_share_a_pass_are_the_best_of_all(
    costs: PassCosts, fixed: tuple[bool, bool]
) -> None:
    draw = random.Random(5)
    sizes = set()
    most = len(costs.verify) - 1
    for _ in range(60):
        chains = [[draw.uniform(0.3, 0.999) for _ in range(draw.randrange(1, 5))][:most] for _ in range(2)]
        others = draw.randrange(3)
        chosen = planned(chains, costs, fixed, others)
        floors = [len(chain) if is_fixed else 0 for chain, is_fixed in zip(chains, fixed, strict=True)]
        every = product(*(range(floor, len(chain) + 1) for floor, chain in zip(floors, chains, strict=True)))
        best = max(rate(chains, lengths, costs, others) for lengths in every)
        assert rate(chains, chosen, costs, others) == pytest.approx(best)
        assert all(length >= floor for length, floor in zip(chosen, floors, strict=True))
        sizes.add(sum(chosen))
    assert len(sizes) > 1 or costs is STEEP


@pytest.mark.parametrize("seed", range(40))
def test_by_its_own_costs_a_plan_is_never_slower_than_full_depth(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        verify = [*accumulate(draw.choice([0.0, 0.01, 0.3, 1.0]) for _ in range(9))]
        costs = PassCosts(
            tuple(1.0 + each for each in verify), wide=((32, 2.0 + verify[-1]), (64, 3.0 + draw.random() + verify[-1]))
        )
        count = draw.choice([1, 2, 5, 16, 40])
        chains = [[draw.uniform(0.05, 0.999) for _ in range(draw.randrange(9))] for _ in range(count)]
        lengths = planned(chains, costs)
        assert rate(chains, lengths, costs, 0) >= rate(chains, [0] * count, costs, 0) * (1 - 1e-9)


def test_what_keys_take_is_a_part_of_the_plan() -> None:
    draw = random.Random(3)
    lengths_seen = set()
    for _ in range(100):
        slope, extra_s, keys_s = draw.uniform(0.01, 0.3), draw.uniform(0.0, 2.0), draw.uniform(0.0, 0.3)
        costs = PassCosts(tuple(1.0 + slope * n for n in range(9)))
        chain = [draw.uniform(0.3, 0.999) for _ in range(8)]

        def seconds(length: int, costs: PassCosts = costs, extra_s: float = extra_s, keys_s: float = keys_s) -> float:
            return costs.verify[length] + extra_s + length * keys_s

        step, _kept = begun([chain], costs, extra_s=extra_s, keys_s=[keys_s])
        step.advance()
        [chosen] = step.plan()
        rates = [sum(prod(chain[:n]) for n in range(length + 1)) / seconds(length) for length in range(9)]
        assert rates[chosen] == pytest.approx(max(rates))
        lengths_seen.add(chosen)
    assert len(lengths_seen) > 4


def test_of_two_sequences_the_one_with_fewer_keys_drafts_more() -> None:
    step, _kept = begun([[0.7] * 8] * 2, PassCosts(tuple(1.0 + 0.1 * n for n in range(9))), keys_s=[0.0, 0.2])
    step.advance()
    few, many = step.plan()
    assert few > many


def test_drafts_that_are_verified_in_any_case() -> None:
    assert planned([[0.1, 0.9]], STEEP, [True]) == [2]
    assert planned([[0.1, 0.9], [0.9]], STEEP, [True, False])[0] == 2


def asked(before: Sequence[float], agreement: float, cost: ExitCost, costs: PassCosts = FLAT) -> list[int]:
    """The sequences that ask an exit, whose tables say these probabilities."""
    step, _kept = begun([[each] if each else [] for each in before], costs, agreement=agreement, exit_cost=cost)
    return [one.row for one in step.advance()[1]]


def test_an_exit_is_asked_when_it_gains_more_than_it_costs() -> None:
    cheap = ExitCost(0.2, 0.05)
    assert asked([0.0], 0.4, cheap) == [0]
    assert asked([0.0], 0.1, cheap) == asked([0.3], 0.4, cheap) == []
    assert asked([0.3], 0.4, ExitCost(0.01, 0.001)) == [0]
    assert asked([0.0], 0.9, ExitCost(0.01, 0.001), STEEP) == [], "where tokens cost as much as passes"


def test_together_sequences_ask_an_exit_that_none_would_ask_alone() -> None:
    cost = ExitCost(alone_s=0.3, each_more_s=0.01)
    assert asked([0.0], 0.4, cost) == []
    assert asked([0.0, 0.0, 0.39], 0.4, ExitCost(0.15, 0.01)) == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_sequences_gains_more(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 7)
    before = [draw.uniform(0.05, 0.9) for _ in range(count)]
    cost = ExitCost(draw.random() * 0.1, draw.random() * 0.05)
    gains_s = [(0.9 - each) / count / USUAL for each in before]

    def profit(chosen: Sequence[int]) -> float:
        costs_s = cost.alone_s + (len(chosen) - 1) * cost.each_more_s
        return sum(gains_s[i] for i in chosen) - costs_s if chosen else 0.0

    every = [c for n in range(count + 1) for c in combinations(range(count), n)]
    assert profit(asked(before, 0.9, cost)) == pytest.approx(max(map(profit, every)))


@pytest.mark.parametrize(
    ("cost", "gain"),
    [
        (ExitCost(1.0, 0.1), 0.5),  # one draft a call
        (ExitCost(1.0, 0.1, 0.0, 4), 0.5 + 0.25 + 0.125 + 0.0625),  # a recorded chain, which is as long in any case
        (ExitCost(1.0, 0.1, 0.1, 8), 0.5 + 0.15 + 0.025),  # the next would save less than it costs
        (ExitCost(1.0, 0.1, 0.6, 8), 0.5),
    ],
)
def test_a_call_is_worth_what_all_its_drafts_save(cost: ExitCost, gain: float) -> None:
    assert call_gain_s(FLAT, cost, 0.5) == pytest.approx(gain)
    assert call_gain_s(STEEP, cost, 0.5) <= 0.0


def test_smoothed_costs_lie_on_a_line_that_never_falls() -> None:
    costs = smoothed([1.0, 1.9, 2.1, 1.9, 2.1, 2.0])
    assert costs[0] == 1.0
    assert costs[1:] == pytest.approx([2.0] * 5, abs=0.05)
    assert all(later >= earlier for earlier, later in pairwise(costs))
    assert smoothed([1.3, 1.0, 1.1, 1.2]) == pytest.approx((1.0, 1.0, 1.1, 1.2))
    assert smoothed([1.0, 3.0, 2.0, 1.0]) == pytest.approx((1.0, 2.0, 2.0, 2.0))
    assert smoothed([2.0, 1.0]) == (2.0, 2.0)
    assert smoothed([2.0]) == (2.0,)
