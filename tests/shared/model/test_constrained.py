"""A token that a constraint does not allow is never chosen, and all others are chosen as without it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.verification import verify
from shared.model import distribution
from shared.model.choosing import choose, num_accepted
from shared.model.distribution import constrained
from shared.model.sampling import SamplingParams, Trial
from tests.drawn_trials import SAMPLED, cases, row_alone
from tests.masks import Masks, drawn_masks

V = 60


@pytest.mark.full
@given(cases((0.0, *SAMPLED)), st.integers(0, 99), st.sampled_from([None, math.nan, math.inf]))
def test_choices_are_those_of_masked_logits(case, seed, strange):
    """On the host and as on another device, row by row. A logit that is not finite counts only where it is allowed."""
    logits, trials = case
    masks = drawn_masks(logits.shape[1], trials, seed)
    generator = torch.Generator().manual_seed(seed)
    if strange is not None:
        logits[torch.rand(logits.shape, generator=generator) < 0.5 / logits.shape[1]] = strange
    held = [trial if own is None else replace(trial, allowed=own) for trial, own in zip(trials, masks, strict=True)]
    before, rows = logits.clone(), iter(logits)
    chosen = choose(logits, held)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())
        as_elsewhere = choose(logits, held)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    for trial, own, other, allowed in zip(trials, chosen, as_elsewhere, masks, strict=True):
        expected = []
        for number in range(trial.num_rows):
            row = next(rows)
            if allowed is not None:
                row = row.where(torch.from_numpy(allowed.mask(number)), -math.inf)
            [[token]] = choose(row[None], [row_alone(trial, number)])
            expected.append(int(token))
        num_counted = 1 + num_accepted(expected, trial.drafts)
        for tokens in (own, other):
            assert tokens.tolist()[:num_counted] == expected[:num_counted]


def test_a_mask_is_made_only_where_the_largest_score_is_forbidden():
    logits = torch.zeros(5, V)
    logits[range(5), [3, 4, 9, 6, 8]] = 1.0
    logits[:, 20] = 0.5
    allowed = np.ones((5, V), np.bool_)
    allowed[2, 9] = False
    allowed[3] = np.arange(V) == 6
    masks = Masks(allowed)
    [chosen] = choose(logits, [Trial(SamplingParams(), [1], [3, 4, 20, 6], allowed=masks)])
    assert chosen.tolist() == [3, 4, 20, 6, 8]
    assert masks.asked == [2]
    masks.asked.clear()
    [chosen] = choose(logits, [Trial(SamplingParams(), [1], [3, 5, 20, 6], allowed=masks)])
    assert chosen.tolist() == [3, 4]
    assert masks.asked == [], "rows that do not count are not asked for"
    sampling = SamplingParams(temperature=MINIMAL)
    [chosen] = choose(logits, [Trial(sampling, [1], [3, 5, 20, 6], allowed=masks)])
    assert chosen.tolist() == [3, 4]
    assert masks.asked == [0, 1]


MINIMAL = 1e-3


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_margin_accepts_drafts_beside_the_largest_allowed_score(elsewhere, monkeypatch):
    """In all rows, after one whose draft is not the largest, too."""
    if elsewhere:
        monkeypatch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())
    logits = torch.zeros(3, V)
    logits[:, 9], logits[:, 5], logits[:, 4] = 3.0, 1.0, 0.5
    allowed = np.ones((3, V), np.bool_)
    allowed[:, 9] = False
    trial = Trial(SamplingParams(), [1], [4, 7], 0.6, allowed=Masks(allowed))
    [verdict] = verify(logits, [trial])
    assert verdict.tokens == [4, 5]
    assert list(verdict.relaxed) == [0]


def test_without_constraints_nothing_is_copied():
    logits = torch.randn(2, V)
    assert constrained(logits, [Trial(SamplingParams(), [1], [2])]) is logits
