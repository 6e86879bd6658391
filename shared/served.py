"""What finished answers of the policy exact took, by the alias that named their router, the router's version and how
many requests ran beside them: what versions are compared by. Workers count it and report it to a calibrator."""

from typing import NamedTuple

# The most tokens of an answer that count in the weight of its speed.
MOST_TOKENS = 512
# Combinations of alias, version and load whose counts a worker goes on with, and reports.
MAX_SERVED = 256


class ServedKey(NamedTuple):
    """`load`: 0 for requests that run alone, 1 beside another one, 2 for three or four together, 3 for five to eight,
    and so on."""

    alias: str
    version: int
    load: int


class Served(NamedTuple):
    """Sums over answers, without what came of the prompts' passes. `num_passes` gave `num_tokens`, `seconds` is what
    their steps took, and `full_seconds` what full depth would have taken of the same machine in the same state (0: not
    known). `weighted_log`: of the natural logarithms of seconds per token, each times a weight of at most MOST_TOKENS
    tokens; `weight`: of the weights."""

    num_requests: float = 0
    num_tokens: float = 0
    num_passes: float = 0
    num_drafted: float = 0
    seconds: float = 0.0
    full_seconds: float = 0.0
    weight: float = 0.0
    weighted_log: float = 0.0

    def plus(self, other: "Served") -> "Served":
        return Served._make(mine + its for mine, its in zip(self, other, strict=True))

    def minus(self, other: "Served") -> "Served":
        return Served._make(mine - its for mine, its in zip(self, other, strict=True))


NOTHING = Served()
