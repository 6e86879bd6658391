"""The sequential test rarely rejects wrongly, and it finds exceeded bounds."""

import math
import random

import pytest

from shared.sequential_test import exceeds, log_evidence


def first_alarm(rate: float, bound: float, num_observed: int, seed: int) -> int | None:
    """The number of observations after which the bound is found exceeded, tested after each event; None if it
    never is."""
    generator = random.Random(seed)
    events = 0
    for observed in range(1, num_observed + 1):
        if generator.random() < rate:
            events += 1
            if exceeds(observed, events, bound):
                return observed
    return None


def test_a_rate_at_its_bound_is_rarely_rejected() -> None:
    alarms = [first_alarm(0.1, 0.1, 1000, seed) for seed in range(300)]
    # Of 300 at most 3 are expected; 10 or more would have a probability below 0.2 %.
    assert sum(alarm is not None for alarm in alarms) < 10


@pytest.mark.parametrize(("rate", "most"), [(0.5, 40), (0.25, 200), (0.15, 2000)])
def test_an_exceeded_bound_is_found_sooner_the_larger_the_excess(rate: float, most: int) -> None:
    found = sorted(first_alarm(rate, 0.1, 4000, seed) or math.inf for seed in range(20))
    assert found[10] <= most


def test_a_few_observations_are_not_enough() -> None:
    assert not exceeds(1, 1, 0.1)
    assert not exceeds(0, 0, 0.1)
    assert exceeds(5, 5, 0.05)
    assert log_evidence(0, 0, 0.1) == pytest.approx(0.0)


def test_the_expected_evidence_at_the_bound_is_one() -> None:
    """The expected evidence after n observations is 1 if the rate equals the bound."""
    n, bound = 12, 0.2
    expected = sum(
        math.comb(n, k) * bound**k * (1 - bound) ** (n - k) * math.exp(log_evidence(n, k, bound)) for k in range(n + 1)
    )
    assert expected == pytest.approx(1.0)
