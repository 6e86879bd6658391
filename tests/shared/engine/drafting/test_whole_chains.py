"""An exit whose chains are drafted in one call, by the native op or as recorded work: it drafts what it drafts step by
step, and only what may pay."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from shared.engine.drafting.chains import Drafting
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.engine.request.sequence import DecodingSequence
from shared.engine.step import Decoder
from shared.ladder import ladder as ladder_module
from shared.ladder import native_chain
from shared.ladder.chain_exit import ChainSteps, SteppedChain
from shared.ladder.exit_head import ExitHead
from shared.ladder.exits import LayerExit
from shared.ladder.ladder import BoundLadder, Ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.proposers import PROMPT_LOOKUP
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.runner import Runner
from shared.ops.chains import ChainStart
from tests.families import build_family
from tests.paged import load_family, make_runner
from tests.random_ladder import random_ladder
from tests.scripted_tables import Table, script_tables

COSTS = PassCosts((1.0,) * 7, exits=(ExitCost(1e-6, 1e-7),))
NUM_DRAFTS = 5


@pytest.fixture(scope="module")
def runner() -> Runner:
    torch.manual_seed(0)
    return ContiguousRunner(wrap_model(build_family("llama"), accelerate=True))


@pytest.fixture(scope="module")
def paged_runner() -> Runner:
    torch.manual_seed(0)
    return make_runner(load_family("llama"))


@pytest.fixture(params=["runner", "paged_runner"])
def any_runner(request: pytest.FixtureRequest) -> Runner:
    """One that drafts by the native op, and one that records its work."""
    found: Runner = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def _equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format of single steps. Fewer bits would change the drafts of random weights."""
    monkeypatch.setattr(native_chain, "FORMAT", "F16")


def exit_ladder(runner: Runner, seed: int = 1) -> Ladder:
    ladder = random_ladder(runner.loaded, seed, depths=(0,))
    torch.manual_seed(seed)
    head = ExitHead(runner.loaded.hidden_size, 64)
    torch.nn.init.normal_(head.gain)
    confidence = ladder.exits[0].confidence
    # Probabilities of about 0.9, so that chains grow to their limits.
    torch.nn.init.constant_(confidence.slope, 0.05)
    torch.nn.init.constant_(confidence.shift, 2.0)
    return replace(ladder, exits=(LayerExit(0, head, confidence),))


def prefilled(
    runner: Runner, bound: BoundLadder, policies: Sequence[DepthPolicy], costs: PassCosts = COSTS
) -> list[DecodingSequence]:
    """Sequences after the prefill of their own prompts."""
    bound.agreements = (9.0,)  # so that it is asked whatever tables say
    decoder, drafter = Decoder(runner), Drafter(runner, costs, bound)
    sequences = []
    for number, policy in enumerate(policies):
        prompt = tuple(range(3 + number, 9 + 3 * number))
        stopping = StoppingParams(max_tokens=20, ignore_eos=True)
        request = GenerationRequest(prompt, stopping=stopping, policy=policy)
        sequence = decoder.admit(request, drafter)
        while not sequence.num_generated:
            decoder.step([sequence])
        sequences.append(sequence)
    return sequences


def drafted(runner: Runner, ladder: Ladder, policies: Sequence[DepthPolicy]) -> list[list[tuple[int, str]]]:
    sequences = prefilled(runner, ladder.bind(runner), policies)
    return [
        [
            (token, chain.sequence.drafter.names[number])
            for token, number in zip(chain.drafts, chain.proposers, strict=True)
        ]
        for chain in Drafting(runner).draft(sequences)
    ]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[list[ChainStart]]:
    """The starts of each call that drafts chains."""
    calls: list[list[ChainStart]] = []
    propose = BoundLadder.propose

    def note(self: BoundLadder, index: int, starts: Sequence[ChainStart]) -> object:
        calls.append(list(starts))
        return propose(self, index, starts)

    monkeypatch.setattr(BoundLadder, "propose", note)
    return calls


def table_of(*positions: int) -> Table:
    """Tables that know the drafts of some positions of every chain, better than an exit may."""
    return lambda drafted: (11 + len(drafted), 0.9999) if len(drafted) in positions else None


def single_steps(
    one: LayerExit, rows: torch.Tensor, bias: torch.Tensor | None, vocabulary: torch.Tensor, _: Runner
) -> SteppedChain:
    return SteppedChain(ChainSteps(one.head, one.confidence, rows, bias), vocabulary)


@pytest.mark.parametrize("positions", [(), (0,), (0, 1), (2,), (1, 3), (0, 1, 2, 3, 4)])
def test_a_whole_chain_has_the_drafts_of_its_single_steps(
    any_runner: Runner, monkeypatch: pytest.MonkeyPatch, noted: list, positions: tuple[int, ...]
) -> None:
    script_tables(monkeypatch, table_of(*positions))
    ladder = exit_ladder(any_runner)
    policies = [DepthPolicy("exact", max_drafts=n) for n in (NUM_DRAFTS, 2, NUM_DRAFTS)]
    whole = drafted(any_runner, ladder, policies)
    assert noted
    calls = len(noted)
    monkeypatch.setattr(ladder_module, "bind_exit", single_steps)
    assert whole == drafted(any_runner, ladder, policies)
    read = [[start.entering is not None for start in starts] for starts in noted]
    assert not any(map(any, read[:calls]))
    assert all(map(all, read[calls:])), "the second time, step by step"
    assert [len(drafts) for drafts in whole] == [NUM_DRAFTS, 2, NUM_DRAFTS]
    for drafts in whole:
        from_tables = [i for i, (_, proposer) in enumerate(drafts) if proposer == PROMPT_LOOKUP]
        assert from_tables == [i for i in positions if i < len(drafts)]


def test_one_call_drafts_all_chains_while_the_tables_are_silent(runner: Runner, noted: list) -> None:
    policies = [DepthPolicy("exact", max_drafts=n) for n in (NUM_DRAFTS, 3)]
    drafted(runner, exit_ladder(runner), policies)
    assert [[start.room for start in starts] for starts in noted] == [[NUM_DRAFTS, 3]]


def test_a_table_that_drafts_another_token_voids_what_was_drafted_after_it(
    any_runner: Runner, monkeypatch: pytest.MonkeyPatch, noted: list
) -> None:
    script_tables(monkeypatch, table_of(2))
    drafted(any_runner, exit_ladder(any_runner), [DepthPolicy("exact", max_drafts=NUM_DRAFTS)])
    first, second = (starts[0] for starts in noted)
    assert (first.place, len(first.tokens), first.room) == (0, 1, NUM_DRAFTS)
    # The head has seen the newest token and two drafts. The table's draft is fed to it, and two more drafts are wanted.
    assert (second.place, list(second.tokens), second.room) == (3, [13], NUM_DRAFTS - 3)


def test_a_table_that_drafts_the_same_token_costs_no_call(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, noted: list
) -> None:
    ladder, policies = exit_ladder(runner), [DepthPolicy("exact", max_drafts=NUM_DRAFTS)]
    [plain] = drafted(runner, ladder, policies)
    script_tables(monkeypatch, lambda drafted: (plain[2][0], 0.9999) if len(drafted) == 2 else None)
    noted.clear()
    [again] = drafted(runner, ladder, policies)
    assert [token for token, _ in again] == [token for token, _ in plain]
    assert again[2][1] == PROMPT_LOOKUP
    assert len(noted) == 1


def test_a_chain_is_drafted_on_while_the_next_draft_is_expected_to_pay(runner: Runner, noted: list) -> None:
    bound = exit_ladder(runner).bind(runner)
    leasts = []
    for each_draft_s in (0.2, 0.4, 0.8):
        costs = replace(COSTS, exits=(ExitCost(0.3, 0.0, each_draft_s, NUM_DRAFTS),))
        sequences = prefilled(runner, bound, [DepthPolicy("exact")], costs)
        Drafting(runner).draft(sequences)
        leasts.append(noted.pop()[0].least_survival)
    # The call is paid for. What a draft saves is proportional to survival, so twice its own cost needs twice of it.
    assert [high / low for low, high in pairwise(leasts)] == pytest.approx([2.0, 2.0])


def test_other_sequences_in_the_batch_change_no_draft(any_runner: Runner) -> None:
    ladder = exit_ladder(any_runner)
    bound = ladder.bind(any_runner)
    sequences = prefilled(any_runner, bound, [DepthPolicy("exact", max_drafts=4)] * 3)
    drafting = Drafting(any_runner)
    alone = [drafting.draft([sequence])[0].drafts for sequence in sequences]
    assert [chain.drafts for chain in drafting.draft(sequences)] == alone
    assert len(set(map(tuple, alone))) == 3


def test_a_model_whose_first_states_are_not_its_embedding_drafts_step_by_step() -> None:
    torch.manual_seed(0)
    runner = ContiguousRunner(wrap_model(build_family("gpt2"), accelerate=True))
    bound = exit_ladder(runner).bind(runner)
    assert bound.state_depths == (0,)
