"""Verdicts on all requests of a step: longest right prefixes, log-probabilities, one read of the device."""

import pytest
import torch
from torch import Tensor

from shared import ops
from shared.engine.verification import compute_choices, verify
from shared.model import distribution
from shared.model.sampling import SamplingParams, Trial
from shared.ops import NO_TOKEN
from tests.device_waits import Crossings, Reads

GREEDY = SamplingParams()


def rows(*choices: int) -> Tensor:
    """Logits [T, 6] with their maxima at `choices`."""
    return torch.nn.functional.one_hot(torch.tensor(choices), 6).float()


@pytest.fixture(params=["cpu", "as on a gpu"])
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "cpu":
        monkeypatch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1e-6)])
def test_each_sequence_keeps_its_longest_right_prefix_and_one_token_more(has_kernels, sampling, monkeypatch):
    if not has_kernels:
        monkeypatch.setattr(ops, "runs_on", lambda device: False)

    def kept(logits: Tensor, *drafts: list[int]) -> list[list[int]]:
        verdicts = verify(logits, [Trial(sampling, [0], own) for own in drafts])
        assert all(verdict.logprobs is None for verdict in verdicts)
        return [verdict.tokens for verdict in verdicts]

    logits = rows(1, 2, 3, 4, 0, 5, 5, 2)  # rows 0..3, 4, 5..7
    assert kept(logits, [1, 2, 4], [], [5, 1]) == [[1, 2, 3], [0], [5, 5]]
    assert kept(rows(1, 2, 3), [1, 2]) == [[1, 2, 3]]
    # What is right after a mistake does not count.
    assert kept(rows(1, 2, 3), [0, 2]) == [[1]]


@pytest.mark.usefixtures("_device")
def test_a_margin_accepts_drafts_that_the_choice_leads_by_no_more():
    """Token 1 leads token 2 by 0.5 and token 3 by 1 in row 0, by 1 and 0.5 in row 1; the last row is a near tie."""
    logits = torch.tensor([[0.0, 9.0, 8.5, 8.0, 0.0], [0.0, 9.0, 8.0, 8.5, 0.0], [0.0, 9.0, 8.9, 0.0, 0.0]])

    def verdict(margin: float | None, *drafts: int) -> tuple[list[int], int]:
        [found] = verify(logits[: len(drafts) + 1], [Trial(GREEDY, [0], drafts, margin)])
        return found.tokens, len(found.relaxed)

    assert verdict(0.5, 2, 3) == ([2, 3, 1], 2)
    assert verdict(0.5, 1, 3) == ([1, 3, 1], 1)
    assert verdict(0.5, 2, 2) == ([2, 1], 1)
    assert verdict(0.5, 3, 3) == ([1], 0)  # what follows a rejected draft does not count
    assert verdict(0.49, 2, 3) == ([1], 0)
    assert verdict(1.0, 3, 2) == ([3, 2, 1], 2)
    assert verdict(100.0, 1, 1) == ([1, 1, 1], 0)
    assert verdict(0.0, 1, 3) == verdict(None, 1, 3) == ([1, 1], 0)
    assert verdict(0.5) == ([1], 0)


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1e-6)])
def test_a_threshold_accepts_drafts_that_are_probable_enough(sampling):
    """Whatever the full model chooses, but not where it cannot choose; and what follows is verified."""

    def verdict(threshold: float | None, *probabilities: float) -> tuple[list[int], int]:
        trial = Trial(sampling, [0], [5, 2, 5], threshold=threshold, probabilities=probabilities)
        [found] = verify(logits, [trial])
        return found.tokens, len(found.relaxed)

    logits = rows(1, 2, 3, 4)
    assert verdict(0.9, 0.9, 0.1, 0.95) == ([5, 2, 5, 4], 2)
    assert verdict(0.9, 0.95, 0.1, 0.89) == ([5, 2, 3], 1)
    assert verdict(0.9, 0.89, 0.9, 0.9) == verdict(None, 0.9, 0.9, 0.9) == ([1], 0)
    logits[0] = float("nan")
    assert verdict(0.9, 1.0, 1.0, 1.0) == ([NO_TOKEN], 0)


@pytest.mark.usefixtures("_device")
def test_a_margin_or_a_threshold_is_enough():
    logits = torch.tensor([[9.0, 8.9, 0.0], [9.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    [both] = verify(logits, [Trial(GREEDY, [0], [1, 2], 0.2, threshold=0.5, probabilities=[0.1, 0.5])])
    assert (both.tokens, len(both.relaxed)) == ([1, 2, 0], 2)


@pytest.mark.usefixtures("_device")
def test_a_margin_is_that_of_its_own_request():
    near = torch.tensor([[9.0, 8.9], [9.0, 8.9]])
    strict, lenient = Trial(GREEDY, [0], [1]), Trial(GREEDY, [0], [1], 0.2)
    sampled = Trial(SamplingParams(temperature=1e-6), [0], [1])
    found = verify(torch.cat([near] * 4), [strict, lenient, sampled, lenient])
    assert [(one.tokens, len(one.relaxed)) for one in found] == [([0], 0), ([1, 0], 1), ([0], 0), ([1, 0], 1)]


def mixed() -> tuple[Tensor, list[Trial], list[int | None]]:
    """Logits [T, 40], requests of every kind with right and wrong drafts, and their numbers of alternatives."""
    kinds = [
        GREEDY,
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(temperature=1.2, seed=3),
        SamplingParams(temperature=1.5, seed=5, top_k=9, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=0.9, seed=8, top_p=0.7, repetition_penalty=0.8),
    ]
    trials, logits = [], []
    for kind in kinds * 2:
        own = torch.randn(4, 40)
        drafts: list[int] = []
        for row in range(3 if len(trials) % 3 else 1):
            [verdict] = verify(own[row : row + 1], [Trial(kind, [7, 9, *drafts])])
            drafts.append(verdict.tokens[0])
        if len(trials) % 2:
            drafts[-1] = (drafts[-1] + 1) % 40
        margin = 1e-3 if kind.is_plain_greedy else None
        # The choice itself is wrong somewhere, and a sure draft in its place is accepted in none of these.
        sure = [0.4] * len(drafts)
        trials.append(
            Trial(kind, [7, 9], drafts, margin, threshold=0.5 if len(trials) > 4 else None, probabilities=sure)
        )
        logits.append(own[: len(drafts) + 1])
    return torch.cat(logits), trials, [None, 0, 3, None, 5, 2, None, None, 1, 0]


@pytest.mark.usefixtures("_device")
def test_other_trials_in_the_batch_change_no_verdict():
    logits, trials, wanted = mixed()
    together = verify(logits, trials, wanted)
    own_rows = logits.split([trial.num_rows for trial in trials])
    for trial, own, count, verdict in zip(trials, own_rows, wanted, together, strict=True):
        assert [verdict] == verify(own, [trial], [count])
        num_wrong = trials.index(trial) % 2
        assert len(verdict.tokens) == len(trial.drafts) + 1 - num_wrong
        if count is not None:
            assert [own.value for own in verdict.logprobs or ()] == [
                float(row.log_softmax(-1)[token]) for row, token in zip(own, verdict.tokens, strict=False)
            ]
            for row, found in zip(own, verdict.logprobs or (), strict=False):
                top = row.log_softmax(-1).topk(count)
                pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                assert found.alternatives == tuple(pairs)


def test_both_ways_give_the_same_verdicts(monkeypatch):
    case = mixed()
    lazily = verify(*case)
    monkeypatch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())
    assert verify(*case) == lazily


def test_a_step_of_all_kinds_of_requests_is_read_once(monkeypatch):
    case = mixed()
    monkeypatch.setattr(distribution, "DEVICES_READ_WITHOUT_SYNC", frozenset())
    with Reads() as reads:
        verify(*case)
    assert reads.found == ["tolist"]


def test_nothing_waits_before_that(monkeypatch):
    logits, trials, wanted = mixed()
    ops.load()
    monkeypatch.setattr(ops, "runs_on", lambda device: True)
    far = logits.to("meta")
    with Crossings() as crossings:
        choices, scores, relaxed = compute_choices(far, trials, wanted)
    assert {part.device.type for part in (*choices, *scores, *relaxed)} == {"meta"}
    assert crossings.awaited == []
    assert len(crossings.others) > 0
