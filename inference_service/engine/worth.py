"""Whether drafting pays at all, learnt from what steps really yield.

The planner weighs drafts by costs measured at start-up, and looking drafts up takes time of its own. Where many sequences share a
pass, little is to be won and both errors may cost more than the drafts bring; then plain decoding is the better step.
"""

from dataclasses import dataclass

# Steps that an average looks back over.
WINDOW_STEPS = 64.0
# Steps of each kind before the two are compared.
MIN_STEPS = 8
# The other kind is tried again every so many steps: often where the two are close, seldom where it clearly loses.
CLOSE_EVERY, CLEAR_EVERY = 16, 64
CLEAR_RATIO = 0.93

Company = tuple[int, int]


@dataclass
class _Yield:
    """Tokens and seconds of one kind of step, older ones counting less."""

    num_steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        keep = 1.0 - 1.0 / WINDOW_STEPS
        self.num_steps = keep * self.num_steps + 1.0
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class DraftingWorth:
    """Chooses between drafting and plain decoding, apart for each kind of company: (sequences that leave the choice, sequences)."""

    def __init__(self) -> None:
        self._yields: dict[Company, dict[bool, _Yield]] = {}
        self._num_chosen: dict[Company, int] = {}

    def choose(self, company: Company) -> bool:
        """Whether this step is to draft."""
        kinds = self._kinds(company)
        number = self._num_chosen[company] = self._num_chosen.get(company, 0) + 1
        drafting, plain = kinds[True], kinds[False]
        if drafting.num_steps < MIN_STEPS:
            return True
        if plain.num_steps < MIN_STEPS:
            # In turns, as the moment may be a slow one for both.
            return number % 2 != 0
        better = drafting.rate >= plain.rate
        ratio = kinds[not better].rate / kinds[better].rate
        every = CLEAR_EVERY if ratio < CLEAR_RATIO else CLOSE_EVERY
        return better if number % every else not better

    def record(self, company: Company, drafted: bool, tokens: int, seconds: float) -> None:
        """What such a step has yielded. Only of steps that read no prompt."""
        self._kinds(company)[drafted].record(tokens, seconds)

    def _kinds(self, company: Company) -> dict[bool, _Yield]:
        return self._yields.setdefault(company, {True: _Yield(), False: _Yield()})
