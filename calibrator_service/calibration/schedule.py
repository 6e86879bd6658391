"""When the phases of a calibration end: shares of its time budget, by what solving, writing and certifying cost on this
machine."""

import math
from collections.abc import Callable

# Share of the budget for the answers of the risk split, at most.
# Certifying reads them again, which takes as long as writing them.
RISK_SHARE = 0.08
# With fewer prompts a bound says little, so nothing is certified and the text gets the time: of 30 prompts, none of
# which differs, 15 % may.
MIN_RISK_PROMPTS = 30
# Tokens written per prompt of the risk split, in answers' lengths: some prompts are written as well.
ANSWERS_PER_PROMPT = 1.15
# Training confidence heads and held-out figures; measuring what exits cost, and packing the router.
ROUTERS_SHARE, REPORT_SHARE = 0.02, 0.04
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
        self._risk_share = RISK_SHARE

    def expect_solving(self, seconds: Callable[[float], float]) -> None:
        """Solving all heads from so many positions takes `seconds(positions)` here."""
        self._seconds_to_solve = seconds
        self.expect_positions(math.inf)

    def expect_positions(self, count: float) -> None:
        """Heads will be solved from at most `count` positions."""
        self._solving_share = min(self._seconds_to_solve(count) / self._budget_s, MAX_SOLVING_SHARE)

    def expect_risk(self, num_prompts: int, answer_tokens: int, tokens_per_s: float) -> None:
        """The risk split can have up to `num_prompts` prompts with answers of `answer_tokens` tokens; the model writes
        `tokens_per_s`."""
        if math.isinf(self._budget_s):
            return
        prompt_s = ANSWERS_PER_PROMPT * answer_tokens / max(tokens_per_s, 1e-9)
        fitting = min(num_prompts, int(RISK_SHARE * self._budget_s / prompt_s))
        is_worth = fitting >= min(num_prompts, MIN_RISK_PROMPTS)
        share = fitting * prompt_s / self._budget_s
        self._risk_share = share if is_worth else 0.0

    def budget_for(self, collecting_s: float) -> float:
        """The least time budget, in seconds, that leaves `collecting_s` for collecting and what solving needs."""
        solving_s = self._solving_share * self._budget_s
        return (collecting_s + solving_s) / (self.collecting + self._solving_share)

    @property
    def certifies(self) -> bool:
        """Whether there is time for a risk split."""
        return self._risk_share > 0.0

    @property
    def routers(self) -> float:
        return 1.0 - REPORT_SHARE - self._risk_share

    @property
    def heads(self) -> float:
        return self.routers - ROUTERS_SHARE

    @property
    def risk_text(self) -> float:
        return self.heads - self._training_share - self._solving_share

    @property
    def collecting(self) -> float:
        return self.risk_text - self._risk_share
