"""What a decode step makes the interpreter do, and a reader pass: Python calls, functions and files, counted. Time is
not."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.engine.request.sequence import DecodingSequence
from shared.engine.step import Decoder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.untrained import untrained_ladder
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel, wrap_model
from tests.families import build_family
from tests.random_ladder import random_ladder

STEPS, OURS = 4, f"{Path(__file__).parents[3] / 'shared'}/"


@pytest.fixture(scope="module")
def accelerated() -> LoadedModel:
    torch.manual_seed(0)
    return wrap_model(build_family("llama"), accelerate=True)


def calls_of(decoder: Decoder, sequences: list[DecodingSequence]) -> Counter[str]:
    """Calls of STEPS steps, by function. What is done once has been done before."""
    decoder.step(sequences)
    found: Counter[str] = Counter()

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(hook)
    try:
        for _ in range(STEPS):
            decoder.step(sequences)
    finally:
        sys.setprofile(None)
    return found


def decoding(
    loaded: LoadedModel, ladder: Ladder, count: int, num_drafts: int
) -> tuple[Decoder, list[DecodingSequence]]:
    runner = ContiguousRunner(loaded)
    decoder, costs = Decoder(runner), PassCosts((1.0,) * 9, exits=(ExitCost(1e-6, 1e-7, 0.0, 8),) * len(ladder.exits))
    drafter = Drafter(runner, costs, ladder.bind(runner))
    sequences = []
    for number in range(count):
        prompt = tuple(range(5 + number, 17 + number)) * 2
        stopping = StoppingParams(max_tokens=60, ignore_eos=True)
        policy = DepthPolicy("exact", max_drafts=num_drafts)
        sequences.append(decoder.admit(GenerationRequest(prompt, stopping=stopping, policy=policy), drafter))
    while not all(sequence.num_generated for sequence in sequences):
        decoder.step(sequences)
    return decoder, sequences


@pytest.mark.parametrize(
    ("with_exit", "count", "most"), [(False, 1, 165), (True, 1, 190), (False, 8, 670), (True, 8, 745)]
)
def test_a_step_makes_few_python_calls(accelerated, with_exit, count, most):
    ladder = random_ladder(accelerated, 1, (0,), agreement=50.0) if with_exit else untrained_ladder(accelerated)
    decoder, sequences = decoding(accelerated, ladder, count, 5)
    assert calls_of(decoder, sequences).total() / STEPS <= most


@pytest.mark.parametrize(("with_exit", "most_functions", "most_files"), [(False, 80, 22), (True, 91, 25)])
def test_a_step_passes_few_functions_and_files(accelerated, with_exit, most_functions, most_files):
    ladder = random_ladder(accelerated, 1, (0,), agreement=50.0) if with_exit else untrained_ladder(accelerated)
    # Those with a name: "path:name", and "path:name.<locals>.<listcomp>" of all others.
    called = [name for name in calls_of(*decoding(accelerated, ladder, 1, 5)) if name.startswith(OURS)]
    assert 0 < sum(not name.endswith(">") for name in called) <= most_functions
    assert len({name.partition(":")[0] for name in called}) <= most_files


def test_a_further_draft_takes_no_python_call_of_drafting(accelerated):
    found = []
    for num_drafts in (1, 6):
        decoder, sequences = decoding(accelerated, random_ladder(accelerated, 1, (0,), agreement=50.0), 1, num_drafts)
        before = sequences[0].num_drafted
        calls = calls_of(decoder, sequences)
        drafting = sum(count for name, count in calls.items() if "/drafting" in name or "/ladder/" in name)
        found.append((sequences[0].num_drafted - before, drafting))
    (few, few_calls), (many, many_calls) = found
    assert many > few + STEPS
    assert many_calls <= few_calls
