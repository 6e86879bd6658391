"""The host's benchmark: its device answers as a model would, and every part of a step is measured."""

import argparse

import pytest
import torch

from bench.host import DRAFTS, PARTS, FreeRunner, decoding, measure
from bench.imposed import SHAPES, Imposed, impose


@pytest.fixture(scope="module")
def imposed() -> Imposed:
    torch.manual_seed(0)
    return impose(SHAPES["tiny"], (0,), 0.8)


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_answers_follow_the_cycle(imposed: Imposed, policy: str) -> None:
    decoder, sequences = decoding(FreeRunner(imposed, 0.0), imposed, policy, 3, 0.8)
    for _ in range(20):
        decoder.step(sequences)
    for number, sequence in enumerate(sequences):
        assert sequence.tokens == imposed.prompt(7 * number, len(sequence.tokens))
        assert (sequence.num_drafted > sequence.num_accepted > 20) == (policy == "exact")


def test_every_part_is_measured(imposed: Imposed) -> None:
    options = argparse.Namespace(steps=8, share=0.8)
    step, *parts, drafts = measure(FreeRunner(imposed, 0.0), imposed, "exact", 2, options)
    assert len(parts) == len(PARTS)
    assert all(each > 0.0 for each in (step, *parts))
    assert drafts == 2 * DRAFTS
