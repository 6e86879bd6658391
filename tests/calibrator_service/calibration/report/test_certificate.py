"""The arithmetic of certification: known values, the last passing threshold, and coverage in the hardest case."""

import math

import numpy as np
import pytest

from calibrator_service.calibration.report.certificate import (
    DELTA,
    EPSILONS,
    MARGINS,
    THRESHOLDS,
    binomial_cdf,
    certify_margins,
    certify_thresholds,
    joint_failure,
    joint_level,
    last_passing,
)
from shared.ladder.risk import MAX_BOUNDS


def test_binomial_against_known_values():
    assert binomial_cdf(3, 10, 0.5) == pytest.approx(176 / 1024, rel=1e-12)
    assert binomial_cdf(0, 59, 0.05) == pytest.approx(0.95**59, rel=1e-12)
    assert binomial_cdf(10, 10, 0.3) == pytest.approx(1.0)
    exact = sum(math.comb(400, k) * 0.05**k * 0.95 ** (400 - k) for k in range(12))
    assert binomial_cdf(11, 400, 0.05) == pytest.approx(exact, rel=1e-9)


def test_thresholds_pass_up_to_the_first_failure():
    # P[Bin(100, 0.1) <= 3] is 0.0078, <= 4 is 0.0237, <= 6 is 0.117.
    assert last_passing(100, [0, 3, 4, 6], 0.1, 0.05) == 3
    assert last_passing(100, [0, 3, 4, 6], 0.1, 0.02) == 2
    # What would pass after the first failure is not even tested.
    assert last_passing(100, [0, 6, 0, 0], 0.1, 0.05) == 1
    assert last_passing(100, [6, 0, 0, 0], 0.1, 0.05) == 0
    assert last_passing(100, [0, 0, 0, 0], 0.1, 0.05) == 4


def test_bounds_are_those_of_the_last_passing_thresholds():
    """Of 200 prompts, 2 differ at thresholds up to 0.98 and 60 at thresholds up to 0.8."""
    certificate = certify_thresholds([0.0] * 140 + [0.8] * 58 + [0.98] * 2)
    counts = dict(zip(THRESHOLDS, certificate.num_differing, strict=True))
    assert [counts[t] for t in (0.99, 0.98, 0.85, 0.8, 0.7)] == [0, 2, 2, 60, 60]
    boldest = {bound.epsilon: bound.value for bound in certificate.bounds}
    level = certificate.level
    for epsilon, threshold in boldest.items():
        bolder = [t for t in THRESHOLDS if t < threshold]
        assert binomial_cdf(counts[threshold], 200, epsilon) <= level
        assert not bolder or binomial_cdf(counts[bolder[0]], 200, epsilon) > level
    assert list(boldest.values()) == [0.99, 0.85, 0.7]
    assert list(boldest) == sorted(boldest)
    assert len(EPSILONS) <= MAX_BOUNDS


def test_margins_are_certified_from_the_smallest_on():
    certificate = certify_margins([math.inf] * 140 + [0.3] * 58 + [0.02] * 2)
    counts = dict(zip(MARGINS, certificate.num_differing, strict=True))
    assert [counts[m] for m in (0.01, 0.02, 0.2, 0.3, 1.0)] == [0, 2, 2, 60, 60]
    assert [bound.value for bound in certificate.bounds] == [0.01, 0.2, 1.0]
    assert certificate.bounds[1].epsilon < 0.1 < 0.3 < certificate.bounds[2].epsilon


@pytest.mark.parametrize("highest", [[], [0.0] * 3, [1.0] * 300])
def test_no_bound_without_enough_evidence(highest):
    """No prompts, too few prompts, and a router that is wrong on every prompt."""
    assert certify_thresholds(highest).bounds == ()


@pytest.mark.parametrize("num_prompts", [30, 150])
def test_joint_failure_equals_its_simulated_frequency(num_prompts):
    level = joint_level(num_prompts, DELTA)
    assert DELTA / len(EPSILONS) <= level < DELTA
    assert joint_failure(num_prompts, level) <= DELTA
    draws = np.random.default_rng(0).random((40_000, num_prompts))
    wrong = np.zeros(len(draws), dtype=bool)
    for epsilon in EPSILONS:
        cdf = np.array([binomial_cdf(k, num_prompts, epsilon) for k in range(num_prompts + 1)])
        wrong |= cdf[(draws <= epsilon).sum(1)] <= level
    assert wrong.mean() == pytest.approx(joint_failure(num_prompts, level), abs=0.004)


def test_all_bounds_together_are_wrong_no_more_often_than_promised():
    """The hardest router: at each threshold its risk is just above another epsilon of the grid."""
    risks = np.array([*EPSILONS, 0.6, 0.7]) + 1e-6
    rng, num_wrong, num_runs = np.random.default_rng(1), 0, 700
    for _ in range(num_runs):
        place = np.searchsorted(risks, rng.random(120))
        highest = [THRESHOLDS[at] if at < len(THRESHOLDS) else 0.0 for at in place]
        num_wrong += any(
            risks[THRESHOLDS.index(bound.value)] > bound.epsilon for bound in certify_thresholds(highest).bounds
        )
    # Three standard deviations; testing every epsilon at delta itself would be wrong in 14 % of runs.
    assert 0 < num_wrong <= (DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / num_runs)) * num_runs
