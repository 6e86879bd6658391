"""The sequential tests rarely find what is not there, and find what is there the sooner the larger it is."""

import itertools
import math
import random

import pytest

from shared.sequential_test import NUM_STAKES, after, joined, log_evidence

BOUND = 0.5


def first_alarm(mean: float, num_observed: int, seed: int, log_alpha: float = math.log(0.01)) -> float:
    """The number of observations after which the mean is found to be above 0, tested after each; inf if it never is."""
    generator, logs = random.Random(seed), [0.0] * NUM_STAKES
    for observed in range(1, num_observed + 1):
        logs = after(logs, generator.gauss(mean, 0.15), BOUND)
        if log_evidence(logs) >= -log_alpha:
            return observed
    return math.inf


def test_a_mean_of_nothing_is_rarely_found_to_be_more() -> None:
    alarms = [first_alarm(0.0, 400, seed) for seed in range(300)]
    # Of 300 at most 3 are expected; 10 or more would have a probability below 0.2 %.
    assert sum(alarm < math.inf for alarm in alarms) < 10


@pytest.mark.parametrize(("mean", "most"), [(0.2, 30), (0.1, 50), (0.05, 150)])
def test_a_mean_is_found_sooner_the_larger_it_is(mean: float, most: int) -> None:
    assert sorted(first_alarm(mean, 1000, seed) for seed in range(21))[10] <= most


def test_the_expected_evidence_is_one_where_the_mean_is_nothing() -> None:
    """Over all 2^8 sequences of two values that are equally probable."""
    total = 0.0
    for signs in itertools.product((-0.3, 0.3), repeat=8):
        logs = [0.0] * NUM_STAKES
        for x in signs:
            logs = after(logs, x, BOUND)
        total += math.exp(log_evidence(logs)) / 2**8
    assert total == pytest.approx(1.0)


@pytest.mark.parametrize("x", [1e300, -1e300, math.inf, -math.inf])
def test_one_observation_decides_nothing_however_large_it_is(x: float) -> None:
    logs = after([0.0] * NUM_STAKES, x, BOUND)
    assert abs(log_evidence(logs)) < math.log(3)


def test_series_are_joined_in_any_order() -> None:
    generator = random.Random(1)
    first, second = ([generator.gauss(0.1, 0.2) for _ in range(5)] for _ in range(2))
    logs = [[0.0] * NUM_STAKES for _ in range(3)]
    for number, series in enumerate((first, second, first + second)):
        for x in series:
            logs[number] = after(logs[number], x, BOUND)
    assert joined(logs[:2]) == pytest.approx(logs[2])
    assert joined([]) == [0.0] * NUM_STAKES


def test_a_change_is_found_however_long_there_was_none() -> None:
    generator, logs, plain = random.Random(2), [0.0] * NUM_STAKES, [0.0] * NUM_STAKES
    for _ in range(2000):
        x = generator.gauss(-0.05, 0.1)
        logs, plain = after(logs, x, BOUND, detects=True), after(plain, x, BOUND)
        assert log_evidence(logs) < math.log(1e4)
    for _ in range(120):
        x = generator.gauss(0.1, 0.1)
        logs, plain = after(logs, x, BOUND, detects=True), after(plain, x, BOUND)
    assert log_evidence(logs) > math.log(1e4)
    assert log_evidence(plain) < 0  # which has all of the past against it
