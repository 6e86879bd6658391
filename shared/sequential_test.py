"""A sequential test of whether a rate is above a bound. It is valid after every observation, however many there are.

For comparing two versions by speed while they serve: the rate is that of pairs of requests in which the new version was
the slower one, and the bound is one half. A test of fixed size would be wrong more often than its level says if it were
repeated after each pair: sooner or later it rejects any version that is just within the bound. Here the evidence
against "the rate is at most b" after k of n observations is

    E = mean over p of  (p/b)^k ((1-p)/(1-b))^(n-k),    p on a grid in (b, 1),

a mixture of likelihood ratios. While the rate is at most b, E is a nonnegative supermartingale that begins at 1, so by
Ville's inequality it ever reaches 1/ALPHA with probability at most ALPHA (Robbins 1970; Ramdas et al. 2023,
"Game-theoretic statistics and safe anytime-valid inference"). Small p on the grid find small excesses late, large ones
find large excesses after a few observations.
"""

import math

# Probability that a rate within its bound is ever found to exceed it.
ALPHA = 0.01
_GRID = 24


def log_evidence(num_observed: int, num_events: int, bound: float) -> float:
    """Natural logarithm of E against "the rate is at most `bound`"; `bound` in (0, 1)."""
    logs = []
    for step in range(1, _GRID + 1):
        p = bound + (1 - bound) * (step / (_GRID + 1)) ** 2
        logs.append(num_events * math.log(p / bound) + (num_observed - num_events) * math.log((1 - p) / (1 - bound)))
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in logs) / _GRID)


def exceeds(num_observed: int, num_events: int, bound: float) -> bool:
    """Whether the rate is above `bound`, with confidence 1 - ALPHA over all calls together."""
    return log_evidence(num_observed, num_events, bound) >= -math.log(ALPHA)
