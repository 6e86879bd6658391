"""From which router probability on, and on how many prompts, may relaxed differ: Learn-then-Test (Angelopoulos et al., 2110.01052).

For a share epsilon, thresholds are tested from the safest to the boldest: p = P[Bin(n, epsilon) <= prompts seen to differ]; those
before the first p > level pass. That alone holds for one epsilon. For all epsilons of a grid at once the level must be lower than
delta, though not as low as delta / grid: what differs at a threshold differs at every bolder one, so the highest threshold at which
a prompt differs is one number T, and the risk at t is P[T >= t]. In terms of uniform U with {T >= t} = {U <= risk at t}, a share
epsilon is wrongly passed somewhere only if #{U <= epsilon} is no more than the count critical for epsilon, whatever the thresholds
and the router. The chance that this happens for any epsilon of the grid is computed exactly (Noe 1972 has the recursion; binomial
bands of Berk and Jones 1979 are this with all epsilons), and the level is the largest that keeps it at delta.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from shared.ladder.risk import RiskBound

DELTA = 0.05
# Chosen before any data is seen, safest first. Routers say 0.999 at most.
THRESHOLDS = (0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.93, 0.9, 0.87, 0.85, 0.8, 0.75, 0.7)
EPSILONS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
_BISECTIONS = 40

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Certificate:
    """`bounds` safest threshold first, each bolder and looser than the one before; () where nothing can be said.

    `level`: of each test, so that all hold together with probability 1 - delta; `num_differing`: of the n prompts, per threshold
    of THRESHOLDS.
    """

    bounds: tuple[RiskBound, ...]
    level: float
    num_differing: tuple[int, ...]


def certify(highest: Sequence[float], delta: float = DELTA) -> Certificate:
    """`highest[i]`: the highest threshold at which prompt i differs, 0 where it never does. Prompts must be independent draws."""
    num_prompts = len(highest)
    counts = tuple(sum(value >= threshold for value in highest) for threshold in THRESHOLDS)
    if not num_prompts:
        return Certificate((), 0.0, counts)
    level = joint_level(num_prompts, delta)
    bounds: list[RiskBound] = []
    for epsilon in EPSILONS:
        passed = last_passing(num_prompts, counts, epsilon, level)
        if passed and (not bounds or THRESHOLDS[passed - 1] < bounds[-1].threshold):
            bounds.append(RiskBound(THRESHOLDS[passed - 1], epsilon))
    return Certificate(tuple(bounds), level, counts)


def last_passing(num_prompts: int, counts: Sequence[int], epsilon: float, level: float) -> int:
    """How many of the thresholds, of which `counts` prompts differ each, safest first, pass before the first that does not."""
    for number, count in enumerate(counts):
        if binomial_cdf(count, num_prompts, epsilon) > level:
            return number
    return len(counts)


def binomial_cdf(count: int, num_trials: int, probability: float) -> float:
    """P[Bin(num_trials, probability) <= count]."""
    return float(min(_pmf(num_trials, probability)[: max(count + 1, 0)].sum(), 1.0))


@cache
def joint_level(num_prompts: int, delta: float) -> float:
    """The largest level at which all tests of the grid together are wrong with probability `delta` at most."""
    steps = _transitions(num_prompts)
    low, high = delta / len(EPSILONS), delta
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _failure(num_prompts, middle, steps) <= delta:
            low = middle
        else:
            high = middle
    return low


def joint_failure(num_prompts: int, level: float) -> float:
    """P[for some epsilon of the grid, the number of n uniforms up to epsilon has P[Bin(n, epsilon) <= number] <= level]."""
    return _failure(num_prompts, level, _transitions(num_prompts))


def _failure(num_prompts: int, level: float, steps: Sequence[Floats]) -> float:
    alive = np.zeros(num_prompts + 1)
    alive[0] = 1.0
    for epsilon, step in zip(EPSILONS, steps, strict=True):
        alive = alive @ step
        alive[np.cumsum(_pmf(num_prompts, epsilon)) <= level] = 0.0
    return 1.0 - float(alive.sum())


def _transitions(num_prompts: int) -> list[Floats]:
    """Per epsilon of the grid [n + 1, n + 1]: from how many uniforms lie up to the epsilon before, to how many up to this one."""
    steps, before = [], 0.0
    for epsilon in EPSILONS:
        step = np.zeros((num_prompts + 1, num_prompts + 1))
        for count in range(num_prompts + 1):
            step[count, count:] = _pmf(num_prompts - count, (epsilon - before) / (1 - before))
        steps.append(step)
        before = epsilon
    return steps


@cache
def _log_factorials(most: int) -> Floats:
    return np.array([math.lgamma(number + 1) for number in range(most + 1)])


def _pmf(num_trials: int, probability: float) -> Floats:
    """Of Bin(num_trials, probability), probability in (0, 1): [num_trials + 1]."""
    log_factorials = _log_factorials(num_trials)
    successes = np.arange(num_trials + 1)
    logs = log_factorials[-1] - log_factorials - log_factorials[::-1]
    found: Floats = np.exp(
        logs + successes * math.log(probability) + successes[::-1] * math.log1p(-probability)
    )
    return found
