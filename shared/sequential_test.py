"""Sequential tests of whether a mean is above 0. They are valid after every observation, however many there are.

For comparing two versions by speed while they serve, where a test of fixed size would be wrong more often than its
level says if it were repeated after each observation: sooner or later it finds a difference between any two versions.
Here the evidence against "the mean of the observations x in [-c, c], given those before, is at most 0" is

    E = mean over f of  product over x of (1 + f x / c),    f on a grid in (0, 1),

what a gambler has who stakes the share f of what he owns on each x. While the mean is at most 0, E is a nonnegative
supermartingale that begins at 1, so by Ville's inequality it ever reaches 1/alpha with probability at most alpha,
whatever the distribution in [-c, c] (Waudby-Smith and Ramdas 2023, "Estimating means of bounded random variables by
betting"). Small f find small means late, large ones find large means after a few observations.

To find a change, each stake's product begins anew whenever it falls below 1: the expected number of observations until
E reaches 1/alpha without a change is then at least 1/alpha (Shin, Ramdas and Rinaldo 2023, "E-detectors").
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

NUM_STAKES = 16
# Dense near 0, because small differences need small stakes.
_STAKES = tuple((step / (NUM_STAKES + 1)) ** 1.5 for step in range(1, NUM_STAKES + 1))


def after(logs: Sequence[float], x: float, bound: float, *, detects: bool = False) -> list[float]:
    """Return the logarithms of the products by stake after a further observation `x`, which counts as the nearest
    value in [-bound, bound]. `logs`: those before; NUM_STAKES zeros at the beginning. `detects`: to find a change."""
    share = min(max(x / bound, -1.0), 1.0)
    return [
        (max(log, 0.0) if detects else log) + math.log1p(stake * share)
        for log, stake in zip(logs, _STAKES, strict=True)
    ]


def log_evidence(logs: Sequence[float]) -> float:
    """Return the natural logarithm of E, from the logarithms of the products by stake."""
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(log - largest) for log in logs) / len(logs))


def joined(several: Iterable[Sequence[float]]) -> list[float]:
    """Return the logarithms of the products over the observations of several series, in whatever order these came."""
    return [math.fsum(column) for column in zip(*several, strict=True)] or [0.0] * NUM_STAKES


def read_logs(values: Iterable[Any]) -> list[float]:
    """Return the logarithms of the products by stake that were written somewhere. Raises ValueError, TypeError."""
    logs = [float(value) for value in values]
    if len(logs) != NUM_STAKES or not all(map(math.isfinite, logs)):
        raise ValueError("these are not the logarithms of a test of this build")
    return logs
