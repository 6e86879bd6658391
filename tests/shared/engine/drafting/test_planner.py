import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from math import prod
from typing import Any

import pytest

from shared.engine.drafting.costs import smoothed
from shared.engine.drafting.planner import (
    MAX_TREE_TOKENS,
    BranchDrafts,
    ExitCost,
    PassCosts,
    Tree,
    best_trees,
    exit_gain_s,
    least_survival,
    select_sequences,
)

FLAT = PassCosts(verify=(1.0,) * 9, exits=(ExitCost(0.01, 0.001),))
STEEP = PassCosts(verify=tuple(float(n) for n in range(1, 10)), exits=(ExitCost(0.01, 0.001),))
STEP = PassCosts(verify=(1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0), exits=(ExitCost(0.2, 0.05),))


def lengths_of(trunks: list[list[float]], costs: PassCosts, **options: Any) -> list[int]:
    return [tree.num_drafts for tree in best_trees(trunks, costs, **options)]


def rate(probabilities: list[float], costs: PassCosts, count: int) -> float:
    expected, survival = 1.0, 1.0
    for probability in probabilities[:count]:
        survival *= probability
        expected += survival
    return expected / costs.verify[count]


@pytest.mark.parametrize("costs", [FLAT, STEEP, STEP])
@pytest.mark.parametrize("probabilities", [[], [0.9] * 8, [0.5] * 8, [0.1] * 8, [0.9, 0.1, 0.9, 0.9], [0.99] * 20])
def test_the_length_is_the_best_of_all(probabilities: list[float], costs: PassCosts) -> None:
    [chosen] = lengths_of([probabilities], costs)
    lengths = range(min(len(probabilities), costs.max_drafts) + 1)
    assert rate(probabilities, costs, chosen) == max(rate(probabilities, costs, count) for count in lengths)


def test_where_tokens_cost_as_much_as_passes_nothing_is_drafted() -> None:
    assert lengths_of([[0.9] * 8], STEEP) == [0]


def test_a_step_in_the_cost_is_crossed_only_if_it_pays() -> None:
    assert lengths_of([[0.9, 0.9, 0.9, 0.1, 0.1]], STEP) == [3]
    assert lengths_of([[0.99] * 8], STEP) == [8]


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
        assert lengths_of(built, costs) == lengths_of(chains, costs)
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


def beside(place: int, *probabilities: float) -> BranchDrafts:
    return BranchDrafts(place, [], list(probabilities))


def tree_rate(
    trunks: list[list[float]],
    branches: list[list[BranchDrafts]],
    trees: Sequence[Tree],
    costs: PassCosts,
    num_other_tokens: int,
) -> float:
    expected, num_tokens = 0.0, num_other_tokens
    for trunk, own, tree in zip(trunks, branches, trees, strict=True):
        expected += sum(prod(trunk[:length]) for length in range(tree.num_drafts + 1))
        for branch, length in zip(own, tree.lengths, strict=True):
            reach = prod(trunk[: branch.place])
            expected += reach * sum(prod(branch.probabilities[:n]) for n in range(1, length + 1))
        num_tokens += 1 + tree.num_drafts + sum(tree.lengths)
    return expected / costs.of_pass(num_tokens)


def all_trees(trunk: list[float], branches: list[BranchDrafts]) -> Iterator[Tree]:
    for length in range(len(trunk) + 1):
        lengths = [range(len(branch.probabilities) + 1) if branch.place <= length else range(1) for branch in branches]
        yield from (Tree(length, picked) for picked in product(*lengths))


@pytest.mark.parametrize("costs", [FLAT, STEEP, STEP])
def test_the_trees_are_the_best_of_all(costs: PassCosts) -> None:
    draw = random.Random(5)
    sizes = set()
    for _ in range(30):
        trunks = [[draw.uniform(0.3, 1.0) for _ in range(draw.randrange(4))] for _ in range(2)]
        branches = [
            [
                beside(
                    place := draw.randrange(len(trunk)),
                    (1 - trunk[place]) * draw.random(),
                    *(draw.random() for _ in range(draw.randrange(2))),
                )
                for _ in range(2 if trunk else 0)
            ]
            for trunk in trunks
        ]
        others = draw.randrange(3)
        chosen = best_trees(trunks, costs, branches=branches, num_other_tokens=others)
        pairs = product(*(all_trees(*one) for one in zip(trunks, branches, strict=True)))
        best = max(tree_rate(trunks, branches, pair, costs, others) for pair in pairs)
        assert tree_rate(trunks, branches, chosen, costs, others) == pytest.approx(best)
        sizes.add(sum(sum(tree.lengths) for tree in chosen))
    assert len(sizes) > 1 or costs is STEEP


def test_free_positions_hold_the_best_branches_up_to_the_limit() -> None:
    branches = [beside(0, 0.01 * number) for number in range(20)]
    [tree] = best_trees([[0.5, 0.5, 0.5]], PassCosts(verify=(1.0,) * 9), branches=[branches])
    assert tree.num_drafts == 3
    assert tree.lengths == (0,) * 8 + (1,) * (MAX_TREE_TOKENS - 4)


def test_a_probable_branch_is_taken_before_an_improbable_draft() -> None:
    costs = PassCosts(verify=(1.0, 1.0, 1.0, 1.0, 9.0))
    [tree] = best_trees([[0.5, 0.1]], costs, branches=[[beside(0, 0.3, 0.9)]])
    assert tree == Tree(1, (2,))


def test_branches_beside_drafts_that_are_verified_in_any_case() -> None:
    branches = [[beside(0, 0.5, 0.3), beside(1, 0.05)]]
    [tree] = best_trees([[0.1, 0.9]], FLAT, branches=branches, least=[2])
    assert tree == Tree(2, (2, 1))
    branches = [[beside(0, 0.0), beside(1, 0.0)]]
    [tree] = best_trees([[0.1, 0.9]], STEEP, branches=branches, least=[2])
    assert tree == Tree(2, (0, 0))


def test_without_chains_there_are_no_trees() -> None:
    assert best_trees([], FLAT) == []
