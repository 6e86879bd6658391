import random
from collections.abc import Sequence
from itertools import combinations, pairwise, product
from math import prod

import pytest

from shared.engine.drafting.costs import smoothed
from shared.engine.drafting.planner import (
    ExitCost,
    PassCosts,
    best_lengths,
    chain_gain_s,
    exit_gain_s,
    least_survival,
    select_sequences,
)

FLAT = PassCosts(verify=(1.0,) * 9, exits=(ExitCost(0.01, 0.001),))
STEEP = PassCosts(verify=tuple(float(n) for n in range(1, 10)), exits=(ExitCost(0.01, 0.001),))
STEP = PassCosts(verify=(1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0), exits=(ExitCost(0.2, 0.05),))


def rate(probabilities: list[float], costs: PassCosts, count: int) -> float:
    expected, survival = 1.0, 1.0
    for probability in probabilities[:count]:
        survival *= probability
        expected += survival
    return expected / costs.verify[count]


@pytest.mark.parametrize("costs", [FLAT, STEEP, STEP])
@pytest.mark.parametrize("probabilities", [[], [0.9] * 8, [0.5] * 8, [0.1] * 8, [0.9, 0.1, 0.9, 0.9], [0.99] * 20])
def test_the_length_is_the_best_of_all(probabilities: list[float], costs: PassCosts) -> None:
    [chosen] = best_lengths([probabilities], costs)
    lengths = range(min(len(probabilities), costs.max_drafts) + 1)
    assert rate(probabilities, costs, chosen) == max(rate(probabilities, costs, count) for count in lengths)


def test_where_tokens_cost_as_much_as_passes_nothing_is_drafted() -> None:
    assert best_lengths([[0.9] * 8], STEEP) == [0]


def test_a_step_in_the_cost_is_crossed_only_if_it_pays() -> None:
    assert best_lengths([[0.9, 0.9, 0.9, 0.1, 0.1]], STEP) == [3]
    assert best_lengths([[0.99] * 8], STEP) == [8]


def cut(chain: list[float], least: float) -> list[float]:
    """The chain up to and including the first draft whose survival is too low."""
    survival = 1.0
    for index, probability in enumerate(chain):
        if survival < least:
            return chain[:index]
        survival *= probability
    return chain


@pytest.mark.parametrize("num_sequences", [1, 2, 8, 16])
def test_drafts_that_are_not_looked_up_would_not_have_been_verified(num_sequences: int) -> None:
    draw = random.Random(num_sequences)
    shorter = 0
    for _ in range(200):
        slope = draw.choice([0.01, 0.05, 0.2])
        costs = PassCosts(tuple(1.0 + slope * n for n in range(9)), wide=((64, 1.0 + slope * 63),))
        chains = [[draw.random() for _ in range(draw.randint(0, 8))] for _ in range(num_sequences)]
        built = [cut(chain, least_survival(costs, num_sequences)) for chain in chains]
        shorter += built != chains
        assert best_lengths(built, costs) == best_lengths(chains, costs)
    assert shorter > 50


def test_chains_beyond_a_step_in_the_costs_are_considered() -> None:
    assert least_survival(PassCosts((1.0, 1.5, *([1.5] * 7))), 1) == pytest.approx(0.5 / 8)
    assert least_survival(STEEP, 1) == 1.0
    assert least_survival(PassCosts((1.0,)), 1) >= 0.0


def asks(costs: PassCosts, *wishes: tuple[float, float]) -> bool:
    """Whether sequences of these survivals and gains, asked together, pay for the first exit."""
    gains_s = [exit_gain_s(survival, gain, costs, len(wishes)) for survival, gain in wishes]
    return bool(select_sequences(gains_s, costs.exits[0]))


def test_an_exit_is_asked_when_it_gains_more_than_it_costs() -> None:
    assert asks(STEP, (1.0, 0.4))
    assert not asks(STEP, (1.0, 0.1))
    assert not asks(STEP, (0.2, 0.4))
    assert asks(FLAT, (1.0, 0.1))


def test_a_draft_is_worth_less_the_more_tokens_a_pass_gives() -> None:
    assert exit_gain_s(0.5, 0.4, FLAT, 1, 2.0) == pytest.approx(0.5 * 0.4 * 0.5)
    assert exit_gain_s(1.0, 0.4, STEEP, 1, 1.5) < 0
    assert exit_gain_s(1.0, 0.4, STEP, 1) == pytest.approx(0.4)


def test_together_sequences_ask_an_exit_that_none_would_ask_alone() -> None:
    cost = ExitCost(alone_s=1.0, each_more_s=0.1)
    assert select_sequences([0.5], cost) == []
    assert select_sequences([0.5, 0.7, 0.5, 0.05], cost) == [0, 1, 2]
    assert select_sequences([], cost) == []


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_sequences_gains_more(seed: int) -> None:
    draw = random.Random(seed)
    gains_s = [draw.random() for _ in range(draw.randint(1, 7))]
    cost = ExitCost(draw.random(), draw.random() / 2)

    def profit(chosen: tuple[int, ...]) -> float:
        return sum(gains_s[i] for i in chosen) - cost.of(len(chosen)) if chosen else 0.0

    every = [c for n in range(len(gains_s) + 1) for c in combinations(range(len(gains_s)), n)]
    chosen = select_sequences(gains_s, cost)
    assert profit(tuple(chosen)) == pytest.approx(max(map(profit, every)))


def test_smoothed_costs_lie_on_a_line_that_never_falls() -> None:
    costs = smoothed([1.0, 1.9, 2.1, 1.9, 2.1, 2.0])
    assert costs[0] == 1.0
    assert costs[1:] == pytest.approx([2.0] * 5, abs=0.05)
    assert all(later >= earlier for earlier, later in pairwise(costs))
    assert smoothed([1.3, 1.0, 1.1, 1.2]) == pytest.approx((1.0, 1.0, 1.1, 1.2))
    assert smoothed([1.0, 3.0, 2.0, 1.0]) == pytest.approx((1.0, 2.0, 2.0, 2.0))
    assert smoothed([2.0, 1.0]) == (2.0, 2.0)
    assert smoothed([2.0]) == (2.0,)


def shared_rate(chains: list[list[float]], lengths: Sequence[int], costs: PassCosts, num_other_tokens: int) -> float:
    expected = sum(prod(chain[:n]) for chain, length in zip(chains, lengths, strict=True) for n in range(length + 1))
    return expected / costs.of_pass(len(chains) + sum(lengths) + num_other_tokens)


@pytest.mark.parametrize("costs", [FLAT, STEEP, STEP])
@pytest.mark.parametrize("least", [(), (1, 0)])
def test_the_lengths_of_sequences_that_share_a_pass_are_the_best_of_all(
    costs: PassCosts, least: tuple[int, ...]
) -> None:
    draw = random.Random(5)
    sizes = set()
    for _ in range(60):
        chains = [[draw.uniform(0.3, 1.0) for _ in range(draw.randrange(1, 5))] for _ in range(2)]
        others = draw.randrange(3)
        chosen = best_lengths(chains, costs, least=least, num_other_tokens=others)
        floors = least or (0, 0)
        every = product(*(range(floor, len(chain) + 1) for floor, chain in zip(floors, chains, strict=True)))
        best = max(shared_rate(chains, lengths, costs, others) for lengths in every)
        assert shared_rate(chains, chosen, costs, others) == pytest.approx(best)
        assert all(length >= floor for length, floor in zip(chosen, floors, strict=True))
        sizes.add(sum(chosen))
    assert len(sizes) > 1 or costs is STEEP


def test_drafts_that_are_verified_in_any_case() -> None:
    assert best_lengths([[0.1, 0.9]], STEEP, least=[2]) == [2]
    assert best_lengths([[0.1, 0.9], [0.9]], STEEP, least=[1, 0]) == [1, 1]


def test_without_chains_there_are_no_lengths() -> None:
    assert best_lengths([], FLAT) == []


@pytest.mark.parametrize(
    ("cost", "room", "gain"),
    [
        (ExitCost(1.0, 0.1), 8, 1.0),  # one draft a call
        (ExitCost(1.0, 0.1, 0.0, 4), 8, 1 + 0.5 + 0.25 + 0.125),  # a recorded chain, which is as long in any case
        (ExitCost(1.0, 0.1, 0.0, 4), 2, 1 + 0.5),
        (ExitCost(1.0, 0.1, 0.2, 8), 8, 1 + (0.5 - 0.2) + (0.25 - 0.2)),  # the next would save less than it costs
        (ExitCost(1.0, 0.1, 0.6, 8), 8, 1.0),
    ],
)
def test_a_call_is_worth_what_all_its_drafts_save(cost, room, gain):
    assert chain_gain_s(1.0, 0.5, cost, room) == pytest.approx(gain)
