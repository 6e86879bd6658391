"""The full model's choices follow the distribution, are the same for a row alone and in a batch, and do not wait for
the device."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from scipy.special import chdtrc
from torch import Tensor

from shared import ops
from shared.model import choosing, distribution
from shared.model.choosing import choose
from shared.model.sampling import SamplingParams, Trial
from shared.ops import NO_TOKEN
from tests.device_waits import Crossings, Reads
from tests.drawn_trials import MIN_TEMPERATURE, SAMPLED, cases, row_alone
from tests.tiers import tiered

DRAWN = settings(max_examples=60)
NUM_SEEDS = 1200
SIGNIFICANCE = 1e-4


def choose_one(logits: Tensor, params: SamplingParams, context: list[int]) -> int:
    """From logits [V]."""
    [[token]] = choose(logits[None], [Trial(params, context)])
    return int(token)


def test_tokens_are_drawn_from_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -math.inf, 0.5]])
    trials = [Trial(SamplingParams(temperature=1.0, seed=seed), []) for seed in range(NUM_SEEDS)]
    expected = NUM_SEEDS * logits[0].double().softmax(-1)
    counts = Counter(int(token) for [token] in choose(logits.expand(NUM_SEEDS, -1), trials))
    assert counts[3] == 0
    kept = [i for i in range(5) if i != 3]
    deviation = sum((counts[i] - float(expected[i])) ** 2 / float(expected[i]) for i in kept)
    assert chdtrc(len(kept) - 1, deviation) > SIGNIFICANCE


def test_greedy_takes_the_largest_after_the_penalty():
    logits = torch.tensor([1.0, 1.5, 1.2])
    assert choose_one(logits, SamplingParams(), [1]) == 1
    assert choose_one(logits, SamplingParams(repetition_penalty=2.0), [1]) == 2


@pytest.mark.parametrize("temperature", [0.0, MIN_TEMPERATURE, 1.0, 1e308])
@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_token_comes_of_the_most_extreme_parameters(temperature, penalty, scale):
    logits = torch.linspace(-scale, scale, 50)
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    assert 0 <= choose_one(logits, params, list(range(50))) < 50
    if temperature == MIN_TEMPERATURE:
        assert choose_one(logits, params, [1]) == 49  # as good as greedy


def test_the_kernel_draws_what_pytorch_and_the_host_draw(monkeypatch):
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(2)) * 3
    trials = [Trial(SamplingParams(temperature=1.0, top_k=40 * (s % 2), seed=s), [1]) for s in range(300)]
    assert ops.runs_on("cpu")
    on_host = choose(logits.expand(300, -1), trials)
    monkeypatch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())
    chosen = choose(logits.expand(300, -1), trials)
    assert chosen == on_host
    monkeypatch.setattr(ops, "runs_on", lambda device: False)
    assert chosen == choose(logits.expand(300, -1), trials)
    assert len({int(token) for [token] in chosen}) > 50


@pytest.mark.parametrize("has_kernels", tiered([True, False], {True}))
@DRAWN
@given(case=cases(temperatures=(0.0, *SAMPLED)))
def test_what_is_chosen_together_is_chosen_row_by_row_and_alone(has_kernels, case):
    logits, trials = case
    with pytest.MonkeyPatch.context() as patch:
        if not has_kernels:
            patch.setattr(ops, "runs_on", lambda device: False)
        lazily = [tokens.tolist() for tokens in choose(logits, trials)]
        patch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())
        together = [tokens.tolist() for tokens in choose(logits, trials)]
        rows = iter(logits)
        for trial, tokens, some in zip(trials, together, lazily, strict=True):
            own = [next(rows) for _ in range(trial.num_rows)]
            alone = [choose(row[None], [row_alone(trial, n)]) for n, row in enumerate(own)]
            assert tokens == [int(token) for [token] in alone]
            assert some == tokens[: len(some)]
            assert len(some) > choosing.num_accepted(tokens, trial.drafts)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("lazily", [True, False])
def test_a_row_that_is_not_finite_chooses_no_token_and_harms_nobody(has_kernels, lazily, monkeypatch):
    if not has_kernels:
        monkeypatch.setattr(ops, "runs_on", lambda device: False)
    if not lazily:
        monkeypatch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())
    sound = torch.randn(1, 30)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1),
    ):
        trial = Trial(params, [1])
        for bad in (math.nan, -math.nan, math.inf, -math.inf):
            for place in (slice(None), 17):
                if place == 17 and bad == -math.inf:
                    continue  # a token that is masked out
                row = sound.clone()
                row[:, place] = bad
                [lost], [token] = choose(torch.cat([row, sound]), [trial, trial])
                assert int(lost) == NO_TOKEN
                assert int(token) == choose_one(sound[0], params, [1])
        masked = sound.clone()
        masked[:, 17] = -math.inf
        assert choose_one(masked[0], params, [1]) in set(range(30)) - {17}


def mixed() -> tuple[Tensor, list[Trial]]:
    """Logits [16, 12] for two requests of every kind."""
    kinds = [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=0.8, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=0.7),
    ]
    trials = [Trial(kind, [1, 2, 1], drafts) for kind in kinds for drafts in ((), (5, 6))]
    return torch.randn(16, 12), trials


def test_choosing_together_waits_for_nothing(monkeypatch):
    logits, trials = mixed()
    monkeypatch.setattr(ops, "runs_on", lambda device: True)
    ops.load()
    far = logits.to("meta")
    with Crossings() as crossings:
        chosen = choose(far, trials)
    assert all(tokens.device.type == "meta" for tokens in chosen)
    assert [len(tokens) for tokens in chosen] == [1, 3] * 4
    assert crossings.awaited == []
    assert crossings.others  # parameters, and tokens that are penalised


def test_choosing_together_launches_each_kind_once(monkeypatch):
    launched = []
    for name in ("choose_greedy", "choose_sampled"):
        own = getattr(choosing, name)
        monkeypatch.setattr(choosing, name, lambda *args, own=own, name=name: [launched.append(name), own(*args)][1])
    monkeypatch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())
    logits, trials = mixed()
    with Reads() as reads:
        choose(logits, trials)
    assert launched == ["choose_greedy", "choose_sampled"]
    assert reads.found == []
