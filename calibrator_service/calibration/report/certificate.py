"""Certifies on how many prompts `relaxed` may differ, per threshold or margin: Learn-then-Test (Angelopoulos et al.,
2110.01052).

For a share epsilon, thresholds are tested from the safest to the boldest: p = P[Bin(n, epsilon) <= prompts seen to
differ]. The thresholds before the first p > level pass. With level delta that holds for a single epsilon.

For all epsilons of a grid together the level must be lower than delta, but not as low as delta / grid size. A prompt
that differs at a threshold differs at every bolder one, so each prompt has one number T, the highest threshold at which
it differs, and the risk at t is P[T >= t]. Write {T >= t} = {U <= risk at t} with a uniform U. Then a share epsilon is
wrongly passed at some threshold only if #{U <= epsilon} is at most the critical count of epsilon, whatever the
thresholds and the router are. The probability that this happens for any epsilon of the grid is computed exactly (the
recursion is that of Noe 1972; the binomial bands of Berk and Jones 1979 are the same with all epsilons). The level is
the largest one that keeps this probability at delta.

The same holds for margins, of which the safest is the smallest, with the lowest margin at which a prompt differs for T.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from shared.ladder.risk import RiskBound

DELTA = 0.05
# Fixed before any data is seen, safest first. A probability is at most 0.999.
THRESHOLDS = (0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.93, 0.9, 0.87, 0.85, 0.8, 0.75, 0.7)
MARGINS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
EPSILONS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
_BISECTIONS = 40

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Certificate:
    """`bounds`: safest setting first, each bolder and looser than the one before; () if nothing can be certified.

    `level`: level of each test, so that all bounds hold together with probability 1 - DELTA. `num_differing`: prompts
    that differ, per setting, safest first.
    """

    bounds: tuple[RiskBound, ...]
    level: float
    num_differing: tuple[int, ...]


def certify_thresholds(highest: Sequence[float]) -> Certificate:
    """`highest[i]`: the highest threshold at which prompt i differs, 0 if it never does.
    Prompts must be drawn independently."""
    counts = [sum(value >= threshold for value in highest) for threshold in THRESHOLDS]
    return _certify(THRESHOLDS, counts, len(highest))


def certify_margins(lowest: Sequence[float]) -> Certificate:
    """`lowest[i]`: the lowest margin at which prompt i differs, inf if it never does.
    Prompts must be drawn independently."""
    counts = [sum(value <= margin for value in lowest) for margin in MARGINS]
    return _certify(MARGINS, counts, len(lowest))


def _certify(settings: Sequence[float], counts: Sequence[int], num_prompts: int) -> Certificate:
    """`counts[i]`: prompts that differ at `settings[i]`, safest first."""
    if not num_prompts:
        return Certificate((), 0.0, tuple(counts))
    level = joint_level(num_prompts, DELTA)
    bounds: dict[float, RiskBound] = {}
    for epsilon in EPSILONS:
        if passed := last_passing(num_prompts, counts, epsilon, level):
            setting = settings[passed - 1]
            bounds.setdefault(setting, RiskBound(setting, epsilon))
    return Certificate(tuple(bounds.values()), level, tuple(counts))


def last_passing(num_prompts: int, counts: Sequence[int], epsilon: float, level: float) -> int:
    """Number of thresholds that pass before the first that does not.
    `counts`: prompts that differ, per threshold, safest first."""
    for number, count in enumerate(counts):
        if binomial_cdf(count, num_prompts, epsilon) > level:
            return number
    return len(counts)


def binomial_cdf(count: int, num_trials: int, probability: float) -> float:
    """P[Bin(num_trials, probability) <= count]."""
    return float(min(_pmf(num_trials, probability)[: max(count + 1, 0)].sum(), 1.0))


@cache
def joint_level(num_prompts: int, delta: float) -> float:
    """The largest level at which some test of the grid is wrong with probability at most `delta`."""
    low, high = delta / len(EPSILONS), delta
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if joint_failure(num_prompts, middle) <= delta:
            low = middle
        else:
            high = middle
    return low


def joint_failure(num_prompts: int, level: float) -> float:
    """Probability that some epsilon of the grid is wrongly passed, given `level` per test.

    That is the case if the number k of n uniforms up to epsilon has P[Bin(n, epsilon) <= k] <= level.
    """
    alive = np.zeros(num_prompts + 1)
    alive[0] = 1.0
    for epsilon, step in zip(EPSILONS, _transitions(num_prompts), strict=True):
        alive = alive @ step
        alive[np.cumsum(_pmf(num_prompts, epsilon)) <= level] = 0.0
    return 1.0 - float(alive.sum())


@lru_cache(maxsize=1)
def _transitions(num_prompts: int) -> list[Floats]:
    """Per epsilon a matrix [n + 1, n + 1]: from the number of uniforms up to the previous epsilon to the number up to
    this one."""
    steps, before = [], 0.0
    for epsilon in EPSILONS:
        step = np.zeros((num_prompts + 1, num_prompts + 1))
        for count in range(num_prompts + 1):
            step[count, count:] = _pmf(num_prompts - count, (epsilon - before) / (1 - before))
        steps.append(step)
        before = epsilon
    return steps


@cache
def _log_factorials(largest: int) -> Floats:
    return np.array([math.lgamma(number + 1) for number in range(largest + 1)])


def _pmf(num_trials: int, probability: float) -> Floats:
    """Probabilities of Bin(num_trials, probability), [num_trials + 1]; `probability` in (0, 1)."""
    log_factorials = _log_factorials(num_trials)
    successes = np.arange(num_trials + 1)
    logs = log_factorials[-1] - log_factorials - log_factorials[::-1]
    pmf: Floats = np.exp(logs + successes * math.log(probability) + successes[::-1] * math.log1p(-probability))
    return pmf
