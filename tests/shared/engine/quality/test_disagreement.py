"""The sequential test that suspends a version: it rarely rejects wrongly, and it finds exceeded bounds."""

import math
import random

import pytest

from shared.engine.quality.disagreement import ALPHA, exceeds, log_evidence, lower_limit


def first_alarm(rate: float, bound: float, num_checks: int, seed: int) -> int | None:
    """The number of checks after which the bound is found exceeded, tested after each one that differs; None if it
    never is."""
    generator = random.Random(seed)
    differing = 0
    for checked in range(1, num_checks + 1):
        if generator.random() < rate:
            differing += 1
            if exceeds(checked, differing, bound):
                return checked
    return None


def test_a_rate_at_its_bound_is_rarely_rejected() -> None:
    alarms = [first_alarm(0.1, 0.1, 1000, seed) for seed in range(300)]
    # Of 300 at most 3 are expected; 10 or more would have a probability below 0.2 %.
    assert sum(alarm is not None for alarm in alarms) < 10


@pytest.mark.parametrize(("rate", "most"), [(0.5, 40), (0.25, 200), (0.15, 2000)])
def test_an_exceeded_bound_is_found_sooner_the_larger_the_excess(rate: float, most: int) -> None:
    found = sorted(first_alarm(rate, 0.1, 4000, seed) or math.inf for seed in range(20))
    assert found[10] <= most


def test_a_few_checks_are_not_enough() -> None:
    assert not exceeds(1, 1, 0.1)
    assert not exceeds(0, 0, 0.1)
    assert exceeds(5, 5, 0.05)
    assert log_evidence(0, 0, 0.1) == pytest.approx(0.0)


def test_the_expected_evidence_at_the_bound_is_one() -> None:
    """The expected evidence after n checks is 1 if the rate equals the bound."""
    n, bound = 12, 0.2
    expected = sum(
        math.comb(n, k) * bound**k * (1 - bound) ** (n - k) * math.exp(log_evidence(n, k, bound)) for k in range(n + 1)
    )
    assert expected == pytest.approx(1.0)


def test_the_lower_limit_is_the_largest_bound_that_is_exceeded() -> None:
    for checked, differing in ((10, 5), (100, 20), (1000, 30)):
        limit = lower_limit(checked, differing)
        assert 0 < limit < differing / checked
        assert exceeds(checked, differing, limit * 0.999)
        assert not exceeds(checked, differing, limit * 1.001)
    assert lower_limit(0, 0) == lower_limit(50, 0) == 0.0
    assert ALPHA == 0.01
