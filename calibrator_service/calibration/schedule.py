"""When the phases of a calibration end: shares of its time budget, by what solving costs on this machine."""

import math
from collections.abc import Callable

# Counting how often answers by the policy relaxed differ.
RELAXED_SHARE = 0.06
# Measuring how much faster the policy exact answers than full depth.
SPEED_SHARE = 0.03
# Training confidence heads and held-out figures; measuring what exits cost, and packing the router.
CONFIDENCE_SHARE, REPORT_SHARE = 0.02, 0.04
# Training heads by gradients, where that is done.
TRAINING_SHARE = 0.28
# A machine or a model for which solving takes longer gets a router late rather than one of no text.
MAX_SOLVING_SHARE = 0.3


class Schedule:
    """Each phase ends at a share of `budget_s`, which may be infinite.
    `trains`: heads are trained after they have been solved."""

    def __init__(self, budget_s: float, *, trains: bool) -> None:
        self._budget_s = budget_s
        self._training_share = TRAINING_SHARE if trains else 0.0
        self._seconds_to_solve: Callable[[float], float] = lambda _: 0.0
        self._solving_share = 0.0

    def expect_solving(self, seconds: Callable[[float], float]) -> None:
        """Solving all heads from so many positions takes `seconds(positions)` here."""
        self._seconds_to_solve = seconds
        self.expect_positions(math.inf)

    def expect_positions(self, count: float) -> None:
        """Heads will be solved from at most `count` positions."""
        self._solving_share = min(self._seconds_to_solve(count) / self._budget_s, MAX_SOLVING_SHARE)

    def budget_for(self, collecting_s: float) -> float:
        """The least time budget, in seconds, that leaves `collecting_s` for collecting and what solving needs."""
        solving_s = self._solving_share * self._budget_s
        return (collecting_s + solving_s) / (self.collecting + self._solving_share)

    @property
    def confidence(self) -> float:
        return 1.0 - REPORT_SHARE - RELAXED_SHARE - SPEED_SHARE

    @property
    def heads(self) -> float:
        return self.confidence - CONFIDENCE_SHARE

    @property
    def collecting(self) -> float:
        return self.heads - self._training_share - self._solving_share
