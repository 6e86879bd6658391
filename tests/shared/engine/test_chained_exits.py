"""Exits that continue chains on their own output: what they see while serving is what they are trained on, and no
answer changes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from calibrator_service.calibration.states.collect import Collector
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.training.chain_outputs import chain_outputs
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from shared.engine.drafting.chains import Drafting
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.engine.step import Decoder
from shared.ladder import native_chain
from shared.ladder.exit_head import ExitHead
from shared.ladder.ladder import BoundLadder, Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.runner import Runner, captured_depths
from shared.model.sampling import SamplingParams
from shared.ops.chains import Chains, ChainStart
from tests.families import NUM_LAYERS, VOCABULARY_SIZE, build_family
from tests.fixed_costs import fixed_cost_engine
from tests.paged import load_family, make_runner
from tests.random_ladder import random_ladder
from tests.scripted_tables import script_tables, without_tables
from tests.tiers import tiered

PROMPT = tuple(range(5, 17))
NUM_NEW = 30
DEPTHS = (0, 3)
COSTS = PassCosts((1.0,) * 7, exits=(ExitCost(1e-6, 1e-7),) * len(DEPTHS))
DRAFTING = DepthPolicy("exact", max_drafts=4)


@dataclass
class Round:
    """One round of drafting: the chain of drafts after `num_settled` tokens, and exit -> [(place, output)]."""

    num_settled: int
    tokens: list[int]
    outputs: dict[int, list[tuple[int, Tensor]]]


def decode(
    runner: Runner, ladder: Ladder, monkeypatch: pytest.MonkeyPatch, places: Sequence[int] = range(1, 9)
) -> tuple[list[int], list[Round]]:
    """Decodes with tables that are right at five positions of six. Exits are worth asking at the `places` of a chain.
    Returns all tokens, and what was drafted in each round."""
    text = [*PROMPT, *plain_answer(runner)]
    rounds: list[Round] = []
    propose = BoundLadder.propose

    def looked_up(drafted: Sequence[int]) -> tuple[int, float]:
        place = len(sequence.tokens) + len(drafted)
        token = text[place] if place % 6 else (text[place] + 1) % VOCABULARY_SIZE
        return token, 0.4 if len(drafted) + 1 in places else 0.999

    def noted(self: BoundLadder, index: int, starts: Sequence[ChainStart]) -> Chains:
        [start], found = starts, propose(self, index, starts)
        if rounds:
            place = start.place + len(start.tokens)
            rounds[-1].outputs.setdefault(index, []).append((place, found.outputs[0, 0]))
        # The tables draft: they know what is right, and the exit's own drafts would end every chain.
        unsure = torch.full_like(found.probabilities, 0.001)
        return found._replace(probabilities=unsure, lengths=torch.ones_like(found.lengths))

    # Fewer bits would change the outputs by more than the tolerance.
    monkeypatch.setattr(native_chain, "FORMAT", "F32")
    script_tables(monkeypatch, looked_up)
    monkeypatch.setattr(BoundLadder, "propose", noted)
    decoder, drafting = Decoder(runner), Drafting(runner)
    request = GenerationRequest(PROMPT, stopping=StoppingParams(max_tokens=NUM_NEW, ignore_eos=True), policy=DRAFTING)
    bound = without_tables(ladder).bind(runner)
    bound.agreements = (0.7,) * len(DEPTHS)
    sequence = decoder.admit(request, Drafter(runner, COSTS, bound))
    while not sequence.is_finished:
        if sequence.num_generated:
            rounds.append(Round(sequence.num_settled, [], {}))
            [chain] = drafting.draft([sequence])
            rounds[-1].tokens = list(chain.tokens)
            noted_rounds, rounds = rounds, []  # the step drafts the same again
            decoder.step([sequence])
            rounds = noted_rounds
        else:
            decoder.step([sequence])
    assert sequence.tokens == text[: len(sequence.tokens)], "rejected drafts have changed nothing"
    assert sequence.num_drafted > sequence.num_accepted > 0, "some drafts were rejected"
    return sequence.tokens, rounds


def plain_answer(runner: Runner) -> list[int]:
    decoder = Decoder(runner)
    request = GenerationRequest(PROMPT, stopping=StoppingParams(max_tokens=NUM_NEW + 4, ignore_eos=True))
    sequence = decoder.admit(request, Drafter(runner, COSTS))
    while not sequence.is_finished:
        decoder.step([sequence])
    return sequence.tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def accelerated() -> LoadedModel:
    torch.manual_seed(0)
    return wrap_model(build_family("llama"), accelerate=True)


@pytest.fixture(params=tiered(["contiguous", "paged"], {"contiguous"}))
def runner(request: pytest.FixtureRequest, accelerated: LoadedModel) -> Runner:
    if request.param == "contiguous":
        return ContiguousRunner(accelerated)
    return make_runner(load_family("llama"))


def test_chains_while_serving_are_those_of_training(runner, monkeypatch, tmp_path):
    """Also after rejections, and for tokens that the tables have drafted: outputs depend on the settled prefix and the
    chain alone."""
    ladder = random_ladder(runner.loaded, 1, DEPTHS)
    tokens, rounds = decode(runner, ladder, monkeypatch)
    trained = outputs_in_training(runner.loaded, ladder, tokens, tmp_path)
    compared = dict.fromkeys(range(1, 5), 0)
    for one in rounds:
        for index, outputs in one.outputs.items():
            for place, output in outputs:
                end = one.num_settled + place
                if one.tokens[:place] == tokens[one.num_settled : end] and end < len(tokens):
                    expected = trained[index][one.num_settled, place]
                    torch.testing.assert_close(output, expected, rtol=0, atol=0.01)
                    compared[place] += 1
    assert all(compared.values()), "chains of every length were compared"


def outputs_in_training(
    loaded: LoadedModel, ladder: Ladder, tokens: list[int], folder: Path
) -> list[dict[tuple[int, int], Tensor]]:
    """Per exit: (position of the first token, place) -> the output [D], from the states that calibration stores."""
    runner = ContiguousRunner(loaded)
    depths = sorted({*DEPTHS, *captured_depths(NUM_LAYERS)})
    collector = Collector(runner, depths, folder, max_state_bytes=1 << 30)
    collector.add("heads", TokenSequence(tuple(tokens), len(PROMPT)))
    collector.finish("heads")
    [chunk] = collector.chunks("heads")
    assert ladder.draft_vocabulary is not None
    vocabulary = DraftVocabulary.of(loaded, ladder.draft_vocabulary)
    found: list[dict[tuple[int, int], Tensor]] = []
    for layer_exit in ladder.exits:
        head = layer_exit.head
        assert isinstance(head, ExitHead)
        own: dict[tuple[int, int], Tensor] = {}
        every = torch.arange(len(chunk))
        outputs = chain_outputs(layer_exit.depth, head, chunk, every, vocabulary, NUM_LAYERS)
        for place, one in enumerate(outputs, 1):
            for position, adapted in zip(one.positions.tolist(), one.adapted, strict=True):
                own[len(PROMPT) + position - place, place] = adapted / head.gain
        found.append(own)
    return found


def test_an_exit_that_was_not_asked_catches_up(accelerated, monkeypatch):
    runner = ContiguousRunner(accelerated)
    ladder = random_ladder(accelerated, 1, DEPTHS)
    with monkeypatch.context() as patch:
        _, always = decode(runner, ladder, patch)
    with monkeypatch.context() as patch:
        _, last_only = decode(runner, ladder, patch, places=(4,))
    compared = 0
    for asked, late in zip(always, last_only, strict=True):
        for index, outputs in late.outputs.items():
            [(place, output)] = outputs
            assert place == 4
            torch.testing.assert_close(output, dict(asked.outputs[index])[4], rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared > len(DEPTHS)


@pytest.mark.parametrize("kind", tiered(["contiguous", "paged"], {"contiguous"}))
def test_exact_answers_are_those_of_full(kind, accelerated):
    """In company, with shared prefixes, greedy and sampled.
    The exits' drafts are mostly wrong, so most chains are rolled back."""
    loaded = accelerated if kind == "contiguous" else load_family("llama")
    options = {} if kind == "contiguous" else {"runner_of": make_runner}
    ladder = random_ladder(loaded, 1, DEPTHS, agreement=0.9)
    hot = SamplingParams(temperature=1.2, top_k=30, seed=3)
    requests = [
        (PROMPT[: 4 + 2 * number] if number % 2 else (*PROMPT, *PROMPT, number + 20), sampling)
        for number, sampling in enumerate([SamplingParams(), hot] * 3)
    ]
    with fixed_cost_engine(loaded, ladder, **options) as engine:

        def answer(request: tuple[tuple[int, ...], SamplingParams], policy: DepthPolicy) -> object:
            prompt, sampling = request
            return engine.generate(prompt, sampling=sampling, policy=policy, max_tokens=14, ignore_eos=True)

        alone = [answer(request, DepthPolicy("full")) for request in requests]
        with ThreadPoolExecutor(len(requests)) as pool:
            together = list(pool.map(lambda request: answer(request, DRAFTING), requests))
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]  # type: ignore[attr-defined]
    assert all(one.stats.num_drafted > one.stats.num_accepted for one in together)  # type: ignore[attr-defined]
