"""A model built for a given agreement (`bench.imposed`) has that agreement. The GPU benchmark relies on it."""

import pytest
import torch
from torch import Tensor

from bench.imposed import SHAPES, Imposed, impose
from shared.engine.engine import Engine
from shared.ladder.exit_head import NUM_STATES
from shared.ladder.ladder import BoundLadder
from shared.ladder.policy import DepthPolicy
from shared.model.contiguous_runner import ContiguousRunner
from shared.ops.chains import ChainStart
from tests.chain_starts import begun
from tests.fixed_costs import fixed_cost_engine

DEPTH, SHARE = 2, 0.8


@pytest.fixture(scope="module")
def imposed() -> Imposed:
    return impose(SHAPES["tiny"], (DEPTH,), SHARE)


def drafts_of(bound: BoundLadder, index: int, entering: Tensor) -> list[tuple[int, float]]:
    """The first drafts of chains whose newest tokens enter the exit with `entering` [N, D]."""
    starts = [ChainStart([0], 0, 1, 1.0, 1.0, 0.0, state) for state in entering.split(1)]
    begins = torch.randn(len(starts), NUM_STATES, entering.shape[1]).unbind()
    found = bound.propose(index, begun(begins, starts))
    return [*zip(found.tokens[:, 0].tolist(), found.probabilities[:, 0].tolist(), strict=True)]


def test_each_token_is_followed_by_the_next_of_the_cycle(imposed: Imposed) -> None:
    with Engine(imposed.loaded) as engine:
        answer = engine.generate(imposed.prompt(3, 12), policy="full", max_tokens=200)
    assert list(answer.token_ids) == imposed.prompt(15, 200)


def test_the_exit_is_right_at_the_share_asked_for(imposed: Imposed) -> None:
    runner = ContiguousRunner(imposed.loaded)
    bound = imposed.ladder.bind(runner)
    size = min(len(imposed.cycle), imposed.loaded.context_length)
    tokens = imposed.prompt(0, size)
    state = runner.capture(torch.tensor([tokens]), [DEPTH])[DEPTH][0]
    drafts = drafts_of(bound, 0, state)
    wanted = imposed.prompt(1, size)
    right = sum(draft == token for (draft, _), token in zip(drafts, wanted, strict=True)) / size
    assert right == pytest.approx(SHARE, abs=0.04)
    assert drafts[0][1] == pytest.approx(SHARE, abs=1e-3)


def test_exact_answers_as_full_and_drafts_by_the_exit(imposed: Imposed) -> None:
    prompt = imposed.prompt(100, 5)
    # Fixed costs make the planner draft, whatever passes cost on this machine.
    with fixed_cost_engine(imposed.loaded, imposed.ladder) as engine:
        full = engine.generate(prompt, policy="full", max_tokens=120)
        exact = engine.generate(prompt, policy=DepthPolicy("exact", max_drafts=3), max_tokens=120)
    assert exact.token_ids == full.token_ids
    accepted = exact.stats.num_accepted / exact.stats.num_verify_passes
    # Expected number of accepted drafts of three: 0.8 + 0.8^2 + 0.8^3.
    assert accepted == pytest.approx(1.95, abs=0.5)


def test_the_first_of_two_exits_is_sure_of_about_half_the_tokens() -> None:
    two = impose(SHAPES["tiny"], (1, DEPTH), SHARE)
    runner = ContiguousRunner(two.loaded)
    bound = two.ladder.bind(runner)
    size = min(len(two.cycle), two.loaded.context_length)
    tokens = two.prompt(0, size)
    captured = runner.capture(torch.tensor([tokens]), [1, DEPTH])
    wanted = two.prompt(1, size)
    for index, depth in enumerate((1, DEPTH)):
        state = captured[depth][0]
        drafts = drafts_of(bound, index, state)
        right = sum(draft == token for (draft, _), token in zip(drafts, wanted, strict=True)) / size
        assert right == pytest.approx(SHARE, abs=0.06)
        sure = sum(probability > SHARE - 0.01 for _, probability in drafts) / size
        assert sure == (pytest.approx(0.5, abs=0.15) if index == 0 else 1.0)
        unsure = [probability for _, probability in drafts if probability < 0.5]
        assert all(p < 0.1 for p in sorted(unsure)[: int(0.9 * len(unsure))])
