"""A token that a constraint does not allow is never chosen, and all others are chosen as without it."""

import math
from dataclasses import replace

import pytest
import torch

from shared.model import distribution
from shared.model.choosing import choose
from shared.model.distribution import constrained
from shared.model.sampling import SamplingParams, Trial

V = 60
KINDS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=9, seed=2),
    SamplingParams(temperature=1.2, top_p=0.6, min_p=0.05, seed=3),
]


@pytest.fixture(params=["read without a synchronisation", "as on another device"])
def _path(request, monkeypatch):
    if request.param == "as on another device":
        monkeypatch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("kind", KINDS)
def test_only_allowed_tokens_are_chosen_by_the_rules_of_the_others(kind):
    """Beside trials without a constraint, and with as few tokens as one."""
    logits = 3 * torch.randn(12, V)
    before = logits.clone()
    allowed = torch.rand(12, V) < torch.linspace(0.02, 1.0, 12)[:, None]
    allowed[:, 7] = True
    trials = [
        Trial(kind, [1, 2], [3, 4, 5], allowed=allowed[:4]),
        Trial(kind, [1, 2], [3, 4, 5]),
        Trial(kind, [5], [6, 7, 8], allowed=allowed[8:]),
    ]
    masked = constrained(logits, trials)
    assert torch.equal(logits, before)
    for rows, trial in zip(masked.split(4), trials, strict=True):
        if trial.allowed is not None:
            assert (rows[~trial.allowed] == -math.inf).all()
    assert torch.equal(masked[4:8], logits[4:8])
    kept = torch.cat([allowed[:4], torch.ones(4, V, dtype=torch.bool), allowed[8:]])
    assert torch.equal(masked[kept], logits[kept])
    for row in range(12):
        trial = replace(trials[row // 4], context=[9], drafts=(), allowed=None)
        [[token]] = choose(masked[row : row + 1], [trial])
        assert kept[row, token]
        few = kept[row].nonzero()[:, 0]
        if kind.repetition_penalty == 1.0 and kind.is_greedy:
            assert token == few[logits[row, few].argmax()]


def test_without_constraints_nothing_is_copied():
    logits = torch.randn(2, V)
    assert constrained(logits, [Trial(SamplingParams(), [1], [2])]) is logits
