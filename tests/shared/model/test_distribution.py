"""Distributions are those of Hugging Face, and the bits of a row do not depend on the other rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shared.model.context_counts import ContextCounts
from shared.model.distribution import candidates, drawn, nucleus, penalised, unit_mass
from shared.model.sampling import SamplingParams, Trial
from tests.changed_scores import changed
from tests.drawn_trials import cases, row_alone
from tests.orders_of_sums import OrdersOfSums

DRAWN = settings(max_examples=60)


def masses(logits: Tensor, trials: list[Trial]) -> Tensor:
    """Masses [T, V] after all filters."""
    params = [trial.sampling for trial in trials for _ in range(trial.num_rows)]
    return nucleus(*candidates(logits, trials), params)


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_counts_that_are_kept_are_those_of_the_text(field):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    params, prompt, answer = SamplingParams(**{field: 1.5}), [1, 2, 1], [3, 3, 2, 7]
    counts = ContextCounts(params, prompt, len(prompt), 20)
    for token in answer:
        counts.append(token)
    for drafts in ((5, 5), (2, 3)):
        whole = Trial(params, [*prompt, *answer], drafts, num_prompt_tokens=3)
        kept = Trial(params, [*prompt, *answer], drafts, num_prompt_tokens=3, counts=counts)
        assert torch.equal(penalised(logits, [kept]), penalised(logits, [whole]))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.9, repetition_penalty=1.4),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.8, min_p=0.05, repetition_penalty=0.7),
        SamplingParams(temperature=0.8, logit_bias={3: 5.0, 9: -4.0, 12: 1.5}, repetition_penalty=1.3),
        SamplingParams(temperature=0.8, min_tokens=4),
        SamplingParams(temperature=0.8, bad_words=((8,), (40, 2), (9, 40, 7, 5), (3, 9, 9, 40, 6), (4, 2))),
    ],
)
def test_the_distribution_is_hugging_faces(params):
    context, drafts, ends = [3, 9, 9, 40], [7, 3, 11], frozenset({1, 49})
    processors = LogitsProcessorList()
    if params.logit_bias:
        biases = {(token,): bias for token, bias in params.logit_bias.items()}
        processors.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.bad_words:
        processors.append(NoBadWordsLogitsProcessor([*map(list, params.bad_words)]))
    if params.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(2, params.min_tokens, [*ends]))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    for _ in range(20):
        logits = 3 * torch.randn(4, 50)
        found = masses(logits, [Trial(params, context, drafts, None, 2, ends)])
        for row in range(4):
            seen = torch.tensor([context + drafts[:row]])
            expected = processors(seen, logits[row : row + 1].clone())[0].softmax(-1)
            assert torch.equal(found[row] > 0, expected > 0)
            actual = (found[row] / found[row].sum()).float()
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def alone(logits: Tensor, trials: list[Trial]) -> list[Tensor]:
    """The masses [1, V] of each row, computed for that row alone."""
    rows = iter(logits.split(1))
    return [masses(next(rows), [row_alone(trial, row)]) for trial in trials for row in range(trial.num_rows)]


@DRAWN
@given(case=cases())
def test_a_row_has_the_same_bits_alone_and_in_company(case):
    logits, trials = case
    before = logits.clone()
    with OrdersOfSums():
        together = masses(logits, trials)
        assert torch.equal(together, torch.cat(alone(logits, trials)))
    assert torch.equal(together, masses(logits, trials))
    assert torch.equal(together, torch.cat(alone(logits, trials)))
    assert torch.equal(logits, before)


@DRAWN
@given(size=st.sampled_from([97, 1000, 1501]), seed=st.integers(0, 10**6))
def test_a_row_has_the_same_bits_where_a_sum_decides_by_a_hair(size, seed):
    """The masses before some token sum exactly to top-p's bound, or exactly to the drawn point."""
    torch.manual_seed(seed)
    logits = 3 * torch.randn(4, size)
    plain = SamplingParams(temperature=1.0)
    whole = masses(logits, [Trial(plain, [0], [0, 0, 0])])
    for at in (2, 9, size // 2):
        shares = whole.sort(descending=True).values[:, :at].sum(-1) / whole.sum(-1)
        trials = [Trial(replace(plain, top_p=share), [0]) for share in shares.tolist()]
        uniforms = whole[:, :at].sum(-1) / whole.sum(-1)
        with OrdersOfSums():
            together = masses(logits, trials)
            assert torch.equal(together, torch.cat(alone(logits, trials)))
            tokens = drawn(whole, uniforms)
            each = [drawn(row, u) for row, u in zip(whole.split(1), uniforms.split(1), strict=True)]
        assert torch.equal(together, masses(logits, trials))
        assert torch.equal(tokens, torch.cat(each))
        assert (whole.gather(1, tokens[:, None]) > 0).all()


@DRAWN
@given(case=cases())
def test_masses_are_whole_and_exact_in_any_order(case):
    logits, trials = case
    found = masses(logits, trials)
    unit = unit_mass(logits.shape[1])
    assert torch.equal(found, found.floor())
    assert (found.amax(-1) == unit).all()
    assert unit * logits.shape[1] <= 2**53


def test_sums_in_another_order_are_others():
    """Otherwise the tests above could not fail."""
    x = torch.rand(3, 1000, dtype=torch.float64)
    with OrdersOfSums():
        for work in (lambda y: y.cumsum(-1), lambda y: y.sum(-1), lambda y: y.softmax(-1)):
            rows = torch.cat([work(row) for row in x.split(1)])
            torch.testing.assert_close(work(x), rows)
            assert not torch.equal(work(x), rows)


def test_a_nucleus_is_taken_in_order_of_probability_then_of_tokens():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])  # e : e^2, so shares of .117 and .322
    for top_p, kept in ((0.01, [1]), (0.33, [1, 3]), (0.65, [0, 1, 3]), (0.77, [0, 1, 2, 3]), (0.99, [0, 1, 2, 3, 4])):
        found = masses(logits, [Trial(SamplingParams(temperature=1.0, top_p=top_p), [0])])
        assert found[0].nonzero()[:, 0].tolist() == kept
    half = masses(torch.zeros(1, 4), [Trial(SamplingParams(temperature=1.0, top_p=0.5), [0])])
    assert half[0].nonzero()[:, 0].tolist() == [0, 1]  # what is before the third is not below a half


def test_the_penalty_counts_a_draft_from_the_row_after_it():
    logits = torch.tensor([[1.0, -1.0, 2.0, 4.0]] * 3)
    trials = [
        Trial(SamplingParams(repetition_penalty=2.0), [1, 1], [3, 1]),
        Trial(SamplingParams(), [0]),
        Trial(SamplingParams(temperature=1.0, repetition_penalty=0.5), [0]),
    ]
    expected = [
        [1.0, -2.0, 2.0, 4.0],
        [1.0, -2.0, 2.0, 2.0],
        [1.0, -2.0, 2.0, 2.0],
        [1.0, -1.0, 2.0, 4.0],
        [2.0, -1.0, 2.0, 4.0],
    ]
    both = torch.cat([logits, logits[:2]])
    assert penalised(both, trials).tolist() == expected
    assert penalised(both[3:4], trials[1:2]).tolist() == expected[3:4]


@DRAWN
@given(case=cases())
def test_scores_are_changed_as_openai_and_vllm_say(case):
    logits, trials = case
    rows = iter(penalised(logits, trials))
    given = iter(logits)
    for trial in trials:
        for row in range(trial.num_rows):
            expected = changed(next(given), row_alone(trial, row))
            torch.testing.assert_close(next(rows), expected, atol=1e-5, rtol=1e-5)


def test_requests_that_change_no_score_cost_nothing():
    logits = torch.randn(3, 9)
    plain = [Trial(SamplingParams(temperature=0.5 * n), [1], num_prompt_tokens=1) for n in range(3)]
    assert penalised(logits, plain) is logits
