"""Exit heads and their confidence heads as functions."""

import pytest
import torch
from torch import nn

from shared.ladder.confidence_head import HIGHEST, LOWEST, ConfidenceHead, scalar_features
from shared.ladder.exit_head import INITIAL_GAIN, NUM_STATES, ExitHead
from shared.ladder.head_rows import Matmul, gather_rows


def test_a_heads_output_depends_on_all_inputs_but_not_on_their_scale() -> None:
    head = ExitHead(8, 16)
    states, entering = torch.randn(3, NUM_STATES, 8), torch.randn(3, 8)
    plain = head(states, entering)
    for place in range(NUM_STATES):
        changed = states.clone()
        changed[:, place] = torch.randn(3, 8)
        assert not torch.allclose(head(changed, entering), plain)
    assert not torch.allclose(head(states, torch.randn(3, 8)), plain)
    torch.testing.assert_close(head(states * 50, entering * 0.1), plain, rtol=1e-3, atol=1e-3)


def test_a_head_starts_with_the_final_norms_gain_where_it_fits() -> None:
    gain = torch.rand(8)
    torch.testing.assert_close(ExitHead(8, 16, gain).gain.data, gain * INITIAL_GAIN)
    torch.testing.assert_close(ExitHead(6, 16, gain).gain.data, torch.full((6,), INITIAL_GAIN))


def test_the_input_norm_is_part_of_the_confidence_head() -> None:
    confidence = ConfidenceHead(8, 16)
    state, scalars = torch.randn(5, 8), torch.randn(5, 3)
    torch.testing.assert_close(confidence(state * 100, scalars), confidence(state, scalars), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        confidence.score(state * 0.01, scalars), confidence.score(state, scalars), rtol=1e-2, atol=1e-2
    )


def test_a_routers_probability_is_bounded() -> None:
    confidence = ConfidenceHead(4, 8)
    with torch.no_grad():
        confidence.shift.fill_(100.0)
        assert float(confidence(torch.randn(4), torch.randn(3))) == pytest.approx(HIGHEST)
        confidence.shift.fill_(-100.0)
        assert float(confidence(torch.randn(4), torch.randn(3))) == pytest.approx(LOWEST)


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
    torch.testing.assert_close(Matmul(rows, own_bias)(states), head(states)[:, vocabulary], rtol=1e-4, atol=1e-4)
    assert (own_bias is None) == (not bias)
