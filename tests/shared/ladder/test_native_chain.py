"""An exit head whose chains are drafted in one native call."""

import copy
from types import SimpleNamespace

import pytest
import torch

from shared.ladder import native_chain
from shared.ladder.ladder import BoundLadder
from shared.ladder.native_chain import embedding_rows
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.ops.chains import ChainStart
from tests.chain_starts import begun
from tests.families import build_family
from tests.random_ladder import random_ladder


@pytest.fixture(scope="module")
def runner() -> ContiguousRunner:
    torch.manual_seed(0)
    return ContiguousRunner(wrap_model(build_family("llama"), accelerate=True))


@pytest.fixture(scope="module")
def bound(runner: ContiguousRunner) -> BoundLadder:
    return random_ladder(runner.loaded, 1, (0,)).bind(runner)


def test_chains_that_begin_and_chains_that_go_on_share_a_call_in_any_order(bound):
    settled = torch.randn(3, 3, 32)
    begins = [torch.randn(32), settled[0], torch.randn(32), settled[1], settled[2]]
    starts = [
        ChainStart([4 + number], int(begin.dim() == 1), 1 + number % 3, 1.0, 1.0, 0.0)
        for number, begin in enumerate(begins)
    ]
    together = bound.propose(0, begun(begins, starts))
    assert together.lengths.tolist() == [start.room for start in starts]
    for row, (begin, start) in enumerate(zip(begins, starts, strict=True)):
        alone = bound.propose(0, [start._replace(begin=begin)])
        for all_chains, own in zip(together, alone, strict=True):
            assert torch.equal(
                all_chains[row][: start.room] if own.dim() > 1 else all_chains[row : row + 1],
                own[0] if own.dim() > 1 else own,
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_a_model_in_16_bits_begin_chains(bound, dtype):
    settled, start = torch.randn(3, 32).to(dtype), ChainStart([4], 0, 3, 1.0, 1.0, 0.0)
    found, expected = (bound.propose(0, [start._replace(begin=each)]) for each in (settled, settled.float()))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.probabilities, expected.probabilities)


def test_the_op_drafts_on_a_cpu_alone(runner, monkeypatch):
    assert embedding_rows(runner, 10) is not None
    elsewhere = copy.copy(runner)
    elsewhere.loaded = SimpleNamespace(device=torch.device("cuda"), parts=runner.loaded.parts)
    monkeypatch.setattr(native_chain, "is_supported", lambda *_: True)
    assert embedding_rows(elsewhere, 10) is None
