"""A sequential test of whether a rate is above its bound. It is valid after every observation, however many there are.

Fixed-sample tests are not: a binomial test at 1 % that is repeated after each check rejects, sooner or later, any
router that is just within its bound. Here the evidence against "the rate is at most b" after k of n checks that
differed is

    E = mean over p of  (p/b)^k ((1-p)/(1-b))^(n-k),    p on a grid in (b, 1),

a mixture of likelihood ratios. While the rate is at most b, E is a nonnegative supermartingale that begins at 1, so by
Ville's inequality it ever reaches 1/ALPHA with probability at most ALPHA (Robbins 1970; Ramdas et al. 2023,
"Game-theoretic statistics and safe anytime-valid inference"). Small p on the grid find small excesses late, large ones
find large excesses within a few checks.
"""

import math

# Probability that a version within its bound is ever found to exceed it, per worker.
ALPHA = 0.01
_GRID = 24
_BISECTIONS = 30


def log_evidence(num_checked: int, num_differing: int, bound: float) -> float:
    """Natural logarithm of E against "the rate is at most `bound`"; `bound` in (0, 1)."""
    logs = []
    for step in range(1, _GRID + 1):
        p = bound + (1 - bound) * (step / (_GRID + 1)) ** 2
        logs.append(
            num_differing * math.log(p / bound) + (num_checked - num_differing) * math.log((1 - p) / (1 - bound))
        )
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(value - largest) for value in logs) / _GRID)


def exceeds(num_checked: int, num_differing: int, bound: float) -> bool:
    """Whether the rate is above `bound`, with confidence 1 - ALPHA over all calls together."""
    return log_evidence(num_checked, num_differing, bound) >= -math.log(ALPHA)


def lower_limit(num_checked: int, num_differing: int) -> float:
    """Lower confidence limit of the rate: the largest bound that `exceeds` finds exceeded; 0 if there is none."""
    low, high = 0.0, num_differing / max(num_checked, 1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle > 0 and exceeds(num_checked, num_differing, middle):
            low = middle
        else:
            high = middle
    return low
