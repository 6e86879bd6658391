"""Exit heads and their routers as functions."""

import pytest
import torch
from torch import nn

from shared.ladder.forms import HEAD_FORMS, HeadForm
from shared.ladder.head_rows import gather_rows, projection
from shared.ladder.heads import NUM_OFFSETS, ExitHead
from shared.ladder.routers import HIGHEST, LOWEST, DepthRouter, scalar_features

ONE = torch.tensor(1)


@pytest.mark.parametrize("form", HEAD_FORMS)
def test_a_heads_output_depends_on_all_inputs_but_not_on_their_scale(form: HeadForm) -> None:
    head = ExitHead(form, 8, 8, 4)
    nn.init.normal_(head.offset)
    state, deep = torch.randn(3, 8), torch.randn(3, 8)
    distance = torch.ones(3, dtype=torch.long)
    plain = head(state, deep, distance)
    assert not torch.allclose(head(torch.randn(3, 8), deep, distance), plain)
    assert not torch.allclose(head(state, torch.randn(3, 8), distance), plain)
    assert not torch.allclose(head(state, deep, distance + 1), plain)
    torch.testing.assert_close(head(state * 50, deep * 0.1, distance), plain, rtol=1e-3, atol=1e-3)
    last = head(state, deep, distance + NUM_OFFSETS - 1)
    torch.testing.assert_close(head(state, deep, distance + 60), last)


def test_a_head_starts_with_the_final_norms_gain_where_it_fits() -> None:
    gain = torch.rand(8)
    torch.testing.assert_close(ExitHead("gated", 8, 8, 4, gain).gain.data, gain)
    narrow = ExitHead("gated", 8, 6, 4, gain)
    assert narrow(torch.randn(8), torch.randn(8), ONE).shape == (6,)


def test_the_input_norm_is_part_of_the_router() -> None:
    router = DepthRouter(8, 16)
    state, scalars = torch.randn(5, 8), torch.randn(5, 3)
    torch.testing.assert_close(
        router(state * 100, scalars), router(state, scalars), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        router.score(state * 0.01, scalars), router.score(state, scalars), rtol=1e-2, atol=1e-2
    )


def test_a_routers_probability_is_bounded() -> None:
    router = DepthRouter(4, 8)
    with torch.no_grad():
        router.shift.fill_(100.0)
        assert float(router(torch.randn(4), torch.randn(3))) == pytest.approx(HIGHEST)
        router.shift.fill_(-100.0)
        assert float(router(torch.randn(4), torch.randn(3))) == pytest.approx(LOWEST)


def test_scalar_features() -> None:
    logits = torch.log(torch.tensor([0.2, 0.7, 0.1])) + 3.0
    features = scalar_features(logits, torch.tensor(3))
    torch.testing.assert_close(features, torch.tensor([torch.log(torch.tensor(0.7)), 0.5, 0.5]))


@pytest.mark.parametrize("bias", [False, True])
def test_head_rows_are_those_of_the_draft_vocabulary(bias: bool) -> None:
    head = nn.Linear(300, 20, bias=bias)
    vocabulary = torch.tensor([3, 7, 19])
    rows, own_bias = gather_rows(head, vocabulary)
    torch.testing.assert_close(rows, head.weight[vocabulary].detach())
    states = torch.randn(2, 300)
    torch.testing.assert_close(
        projection(rows, own_bias)(states),
        head(states)[:, vocabulary],
        rtol=1e-4,
        atol=1e-4,
    )
    assert (own_bias is None) == (not bias)
