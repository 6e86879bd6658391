"""Whole chains begin with the state of the settled prefix alone: in company, sampled, after rollbacks and over copied
prefixes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.engine.drafting.chains import Drafting
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.memory.prefixes import MIN_SHARED, Prefixes
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.engine.request.sequence import DecodingSequence
from shared.engine.step import Decoder
from shared.ladder.ladder import BoundLadder, Ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.proposers import exit_name
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.runner import CapturedStates
from shared.model.sampling import SamplingParams
from shared.ops.chains import ChainStart
from tests.families import NUM_LAYERS, VOCABULARY_SIZE, build_family
from tests.random_ladder import random_ladder
from tests.scripted_tables import Table, script_tables, without_tables

COSTS = PassCosts((1.0,) * 7, exits=(ExitCost(1e-6, 1e-7),))
PREFIX = tuple(range(5, 9 + MIN_SHARED))
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.2, top_k=30, seed=3)
# The prompts that begin with PREFIX take over its keys and values.
REQUESTS = [((*PREFIX, 30), GREEDY), ((*PREFIX, 31), SAMPLED), ((7, 8, 9), GREEDY), ((9, 8), SAMPLED)]  # fmt: skip


def request_of(prompt: Sequence[int], sampling: SamplingParams, policy: DepthPolicy) -> GenerationRequest:
    stopping = StoppingParams(max_tokens=24, ignore_eos=True)
    return GenerationRequest(tuple(prompt), sampling, stopping, policy)


def knowing(sequences: Sequence[DecodingSequence], number: int, text: Sequence[int]) -> Table:
    """Tables that know the answer. At one position of four they are silent, and at one of five they are wrong."""

    def propose(drafted: Sequence[int]) -> tuple[int, float] | None:
        place = len(sequences[number].tokens) + len(drafted)
        if place % 4 == 0:
            return None
        return (text[place] + (place % 5 == 0)) % VOCABULARY_SIZE, 0.99

    return propose


@pytest.fixture(scope="module")
def runner() -> ContiguousRunner:
    torch.manual_seed(0)
    return ContiguousRunner(wrap_model(build_family("llama"), accelerate=True))


@pytest.fixture(scope="module")
def ladder(runner: ContiguousRunner) -> Ladder:
    """One exit, whose drafts have a probability of about a half."""
    [layer_exit] = random_ladder(runner.loaded, 1, (0,)).exits
    for parameter in layer_exit.confidence.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return without_tables(replace(random_ladder(runner.loaded, 1, (0,)), exits=(layer_exit,)))


def settled_states(runner: ContiguousRunner, bound: BoundLadder, tokens: list[int]) -> Tensor:
    """The states [3, D] of the last of the tokens, from one pass over all of them."""
    captured: CapturedStates = {}
    cache = runner.new_cache(len(tokens))
    last = runner.run(runner.ids(tokens), cache, first=0, last=NUM_LAYERS, base=0, captured=captured)
    return torch.stack([*(captured[depth][0, -1] for depth in bound.kept_depths), last[0, -1]])


def test_every_draft_is_that_of_the_settled_prefix_and_the_chain(runner, ladder, monkeypatch):
    decoder = Decoder(runner, Prefixes(1 << 12))
    bound = ladder.bind(runner)
    bound.agreements = (1.0,)
    drafter = Drafter(runner, COSTS, bound)
    assert bound.state_depths == ()
    texts = {}
    for prompt, sampling in [(PREFIX, GREEDY), *REQUESTS]:
        request = request_of(prompt, sampling, DepthPolicy("full"))
        alone = decoder.admit(request, Drafter(runner, COSTS))
        while not alone.is_finished:
            decoder.step([alone])
        texts[request.prompt_ids] = [*alone.tokens, 0, 0, 0, 0]
        if prompt == PREFIX:
            decoder.prefixes.insert(alone)
    sequences: list[DecodingSequence] = []
    answers = [texts[tuple(prompt)] for prompt, _ in REQUESTS]
    script_tables(monkeypatch, *(knowing(sequences, number, text) for number, text in enumerate(answers)))
    requests = [request_of(*request, DepthPolicy("exact", max_drafts=5)) for request in REQUESTS]
    sequences += [decoder.admit(each, drafter) for each in requests]
    drafting = Drafting(runner)
    num_compared = 0
    while going := [sequence for sequence in sequences if not sequence.is_finished]:
        writing = [sequence for sequence in going if sequence.num_generated]
        for sequence, chain in zip(writing, drafting.draft(writing), strict=True):
            states = settled_states(runner, bound, sequence.tokens[: sequence.num_settled])
            assert torch.equal(sequence.settled_states, states)
            for place, (draft, number) in enumerate(zip(chain.drafts, chain.proposers, strict=True)):
                if drafter.names[number] == exit_name(0):
                    start = ChainStart(chain.tokens[: place + 1], 0, 1, 1.0, 1.0, 0.0, begin=states)
                    found = bound.propose(0, [start])
                    assert [[draft]] == found.tokens.tolist()
                    assert chain.probabilities[place] == found.probabilities.item()
                    num_compared += 1
        decoder.step(going)
    assert num_compared > 20
    for sequence in sequences:
        check(sequence, texts[tuple(sequence.request.prompt_ids)])


def check(sequence: DecodingSequence, text: list[int]) -> None:
    assert sequence.tokens == text[: len(sequence.tokens)]
    assert sequence.num_drafted > sequence.num_accepted > 0, "some drafts were rolled back"
    assert (sequence.num_cached > 0) == (sequence.request.prompt_ids[: len(PREFIX)] == PREFIX)
