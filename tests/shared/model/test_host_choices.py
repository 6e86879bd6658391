"""What is drawn from the few tokens that can be drawn is what is drawn from whole rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.model import host_choices
from shared.model.distribution import candidates, drawn, nucleus
from shared.model.host_choices import draw, token_at
from shared.model.sampling import SamplingParams, Trial
from shared.ops import NO_TOKEN
from tests.drawn_trials import MIN_TEMPERATURE

DRAWN = settings(max_examples=150)
UNIFORMS = (0.0, 1e-9, 0.03, 0.3, 0.5, 0.77, 0.97, 1 - 1e-9, math.nextafter(1.0, 0.0))


def from_whole_row(logits: Tensor, sampling: SamplingParams) -> list[int]:
    """The token of a row [1, V] at each uniform number."""
    kept = nucleus(*candidates(logits, [Trial(sampling, [0])]), [sampling])
    found = drawn(kept.expand(len(UNIFORMS), -1), torch.tensor(UNIFORMS, dtype=torch.float64))
    return [int(token) for token in found]


@DRAWN
@given(
    size=st.sampled_from([1, 2, 5, 300, 1501, 9001, 50_000]),
    scale=st.sampled_from([0.0, 0.01, 3.0, 30.0, 1e30]),
    temperature=st.sampled_from([MIN_TEMPERATURE, 0.3, 1.0, 2.0, 1e308]),
    top_k=st.sampled_from([0, 1, 40, 512, 2000]),
    top_p=st.one_of(
        st.floats(0.0, 1.0, exclude_min=True), st.sampled_from([1e-300, 0.9, math.nextafter(1.0, 0.0), 1.0])
    ),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    is_coarse=st.booleans(),
    is_masked=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_token_is_that_of_the_whole_row(size, scale, temperature, top_k, top_p, min_p, is_coarse, is_masked, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(1, size, generator=generator)
    if is_coarse:  # many are equal
        logits = logits.mul(4).round().div(4)
    if is_masked:
        logits[:, 1:][torch.rand(1, size - 1, generator=generator) < 0.5] = -math.inf
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = logits[0].numpy()
    found = [token_at(uniform, row, sampling) for uniform in UNIFORMS]
    assert found == from_whole_row(logits, sampling)


@pytest.mark.parametrize("distance", [25.0, 26.0, 26.3, 26.35, 27.0, 28.0])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
def test_tokens_at_the_edge_of_no_mass(distance, temperature):
    """At the largest uniform number, the last token that has any mass is drawn."""
    logits = torch.full((1, 49_152), -math.inf)
    logits[0, 7], logits[0, 40_000] = 1.5, 1.5 - distance * temperature
    sampling = SamplingParams(temperature=temperature)
    found = [token_at(uniform, logits[0].numpy(), sampling) for uniform in UNIFORMS]
    assert found == from_whole_row(logits, sampling)
    assert found[0] == 7


def test_rows_after_a_draft_that_was_not_drawn_are_left_out(monkeypatch):
    logits = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    trial = Trial(SamplingParams(temperature=1e-3), [0], [1, 1])
    asked = []
    right = host_choices.token_at
    monkeypatch.setattr(host_choices, "token_at", lambda *args: [asked.append(1), right(*args)][1])
    [tokens] = draw(logits, [trial])
    assert tokens.tolist() == [1, 0]
    assert len(asked) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_row_that_is_not_finite_has_no_token(bad, top_k):
    row = torch.randn(30)
    row[17] = bad
    sampling = SamplingParams(temperature=1.0, top_k=top_k, top_p=0.9)
    assert token_at(0.5, row.numpy(), sampling) == NO_TOKEN
    assert token_at(0.5, torch.full((30,), -math.inf).numpy(), sampling) == NO_TOKEN
