"""The states that an engine shows of a request's tokens are those of a pass over the whole sequence."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shared.engine.engine import Engine
from shared.ladder.policy import DepthPolicy
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from shared.model.runner import captured_depths
from tests.fixed_costs import fixed_cost_engine
from tests.random_ladder import random_ladder

PROMPT = list(range(3, 40))


@pytest.fixture(params=["full", "exact"])
def policy(request) -> DepthPolicy:
    return DepthPolicy(request.param, max_drafts=3 if request.param == "exact" else 0)


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    with fixed_cost_engine(loaded, random_ladder(loaded, 2), prefix_cache_bytes=0) as engine:
        yield engine


def test_each_settled_token_is_shown_once_and_in_order(loaded, engine, policy):
    """Also beside another request, and where drafts are rejected."""
    shown: list[tuple[int, Tensor]] = []
    other = engine.submit(PROMPT[::-1], policy="full", max_tokens=20)
    handle = engine.submit(
        PROMPT,
        policy=policy,
        max_tokens=20,
        ignore_eos=True,
        on_states=lambda position, states: shown.append((position, states)),
    )
    answer = [t.token_id for event in handle.events() for t in getattr(event, "tokens", ())]
    list(other.events())
    place = 0
    for position, states in shown:
        assert position == place
        place += len(states)
    found = torch.cat([states for _, states in shown])
    tokens = [*PROMPT, *answer][:place]
    assert place >= len(PROMPT) + len(answer) - 1
    depths = [*captured_depths(loaded.num_layers), loaded.num_layers]
    captured = ContiguousRunner(loaded).capture(torch.tensor([tokens]), depths)
    expected = torch.stack([captured[depth][0] for depth in depths], 1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_copied_prefix_is_not_shown(loaded):
    with fixed_cost_engine(loaded) as engine:
        engine.generate(PROMPT, policy="full", max_tokens=4)
        shown: list[int] = []
        handle = engine.submit(
            PROMPT, policy="full", max_tokens=4, on_states=lambda position, _: shown.append(position)
        )
        list(handle.events())
    assert shown[0] > 0
