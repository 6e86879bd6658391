"""Drafting for several sequences: a sequence's drafts do not depend on the others, and each asks its own ladder."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from shared.engine.drafting.chains import Drafting
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.engine.request.sequence import DecodingSequence
from shared.engine.step import Decoder
from shared.ladder.ladder import BoundLadder, Ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.proposers import Draft, exit_name
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.runner import Runner
from shared.model.sampling import SamplingParams
from shared.ops.chains import ChainStart
from tests.families import build_family
from tests.random_ladder import random_ladder
from tests.scripted_tables import script_tables

DEPTHS = (0, 2)
# Every exit is expected to gain, whatever tables say.
EAGER = 9.0
COSTS = PassCosts((1.0,) * 7, exits=(ExitCost(1e-6, 1e-7),) * len(DEPTHS))


@pytest.fixture(scope="module")
def runner() -> Runner:
    torch.manual_seed(0)
    return ContiguousRunner(wrap_model(build_family("llama"), accelerate=True))


def prefilled(
    runner: Runner, ladders: Sequence[Ladder], policies: Sequence[DepthPolicy], costs: PassCosts = COSTS
) -> list[DecodingSequence]:
    """Sequences after the prefill of their own prompts, each with its ladder's drafter."""
    decoder = Decoder(runner)
    drafters: dict[int, Drafter] = {}
    found = []
    for number, (ladder, policy) in enumerate(zip(ladders, policies, strict=True)):
        if id(ladder) not in drafters:
            bound = ladder.bind(runner)
            bound.agreements = (EAGER,) * len(DEPTHS)
            drafters[id(ladder)] = Drafter(runner, costs, bound)
        prompt = tuple(range(3 + number, 9 + 3 * number))
        stopping = StoppingParams(max_tokens=20, ignore_eos=True)
        request = GenerationRequest(prompt, stopping=stopping, policy=policy)
        sequence = decoder.admit(request, drafters[id(ladder)])
        while not sequence.num_generated:
            decoder.step([sequence])
        found.append(sequence)
    return found


def drafts_of(drafting: Drafting, sequences: Sequence[DecodingSequence]) -> list[list[tuple[int, int]]]:
    """(token, depth) of each draft."""
    return [
        [
            (token, chain.sequence.drafter.exits[number].depth)
            for token, number in zip(chain.drafts, chain.proposers, strict=True)
        ]
        for chain in drafting.draft(sequences)
    ]


def test_other_sequences_in_the_batch_change_no_draft(runner):
    first, second = (random_ladder(runner.loaded, seed) for seed in (2, 3))
    exact = DepthPolicy("exact", max_drafts=3)
    policies = [exact, exact, exact, DepthPolicy("exact", max_drafts=3, min_layers=1)]
    batch = prefilled(runner, [first, second, first, first], policies)
    drafting = Drafting(runner)
    alone = [drafts_of(drafting, [sequence])[0] for sequence in batch]
    assert drafts_of(drafting, batch) == alone
    assert all(alone)
    assert max(len(drafts) for drafts in alone) == 3
    tokens = [tuple(token for token, _ in drafts) for drafts in alone]
    assert len(set(tokens)) == len(batch), "sequences that draft alike show nothing"
    assert {depth for _, depth in alone[3]} == {2}
    assert {depth for drafts in alone for _, depth in drafts} == set(DEPTHS)


def test_one_exit_is_asked_once_for_all_that_want_it(runner, monkeypatch):
    ladder = random_ladder(runner.loaded, 1, (1, 2))
    batch = prefilled(runner, [ladder] * 3, [DepthPolicy("exact", max_drafts=n) for n in (1, 2, 2)])
    asked: list[int] = []
    propose = BoundLadder.propose

    def noted(self: BoundLadder, index: int, starts: Sequence[ChainStart]) -> object:
        asked.append(len(starts))
        return propose(self, index, starts)

    monkeypatch.setattr(BoundLadder, "propose", noted)
    runner.counters.reset()
    Drafting(runner).draft(batch)
    assert asked == [3, 3, 2, 2]
    assert runner.counters.per_layer[:2] == [2, 2], "one shallow pass a round"
    assert sum(runner.counters.per_layer[2:]) == 0


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0)])
@pytest.mark.parametrize("relaxed", [DepthPolicy("relaxed", margin=1e6), DepthPolicy("relaxed", threshold=0.01)])
def test_drafts_that_relaxed_accepts_do_not_count_for_other_requests(runner, sampling, relaxed):
    [sequence] = prefilled(runner, [random_ladder(runner.loaded, 1)], [relaxed])
    near = GenerationRequest((1,), policy=relaxed)
    exact = GenerationRequest((1,), sampling=sampling, policy=DepthPolicy("exact"))
    drafter = sequence.drafter
    before = [drafter.confidence(request).factor("depth-0") for request in (near, exact)]
    for _ in range(40):
        drafter.confidence(sequence.request).record([[Draft(5, 0.5, "depth-0", 0)]], [5])
    after = [drafter.confidence(request).factor("depth-0") for request in (near, exact)]
    assert after[0] > before[0] + 0.3
    assert after[1] == before[1]


@pytest.mark.parametrize(("growth", "is_asked"), [(0.9, True), (1.0, False)])
def test_nobody_is_asked_where_even_a_sure_draft_would_not_pay(runner, monkeypatch, growth, is_asked):
    asked: list[Sequence[int]] = []
    script_tables(monkeypatch, asked.append)
    costs = replace(COSTS, verify=tuple(1.0 + growth * n for n in range(7)))
    [sequence] = prefilled(runner, [random_ladder(runner.loaded, 1)], [DepthPolicy("exact")], costs)
    Drafting(runner).draft([sequence])
    assert bool(asked) == is_asked


def test_an_exit_that_is_too_expensive_is_not_asked(runner, monkeypatch):
    ladder = random_ladder(runner.loaded, 1)
    costs = replace(COSTS, exits=(ExitCost(1e-6, 1e-7), ExitCost(200.0, 0.1)))
    [sequence] = prefilled(runner, [ladder], [DepthPolicy("exact", max_drafts=2)], costs)
    [drafts] = drafts_of(Drafting(runner), [sequence])
    assert [depth for _, depth in drafts] == [0, 0]


def test_an_exit_whose_probability_is_no_number_loses_that_draft_alone(runner):
    ladder = random_ladder(runner.loaded, 0, DEPTHS)
    for parameter in ladder.exits[0].confidence.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    [sequence] = prefilled(runner, [ladder], [DepthPolicy("exact", max_drafts=2)])
    [drafts] = drafts_of(Drafting(runner), [sequence])
    assert sequence.failure is None
    assert {depth for _, depth in drafts} == {DEPTHS[1]}
    factors = [sequence.drafter.confidence(sequence.request).factor(exit_name(depth)) for depth in DEPTHS]
    assert all(map(math.isfinite, factors)), "nor is that exit out of use for ever"
