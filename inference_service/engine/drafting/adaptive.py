"""Whether drafting pays at all, learnt from what steps really yield.

The planner weighs drafts by costs measured at start-up, and looking drafts up takes time of its own. Where many sequences share a
pass, little is to be won and both errors may cost more than the drafts bring; then plain decoding is the better step.
"""

from collections import defaultdict
from dataclasses import dataclass, field

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


@dataclass
class _Comparison:
    drafting: _Yield = field(default_factory=_Yield)
    plain: _Yield = field(default_factory=_Yield)
    num_chosen: int = 0


def _kind(company: Company) -> Company:
    """Companies that are nearly as large learn together: sequences come and go within a few steps."""

    def about(count: int) -> int:
        step = max((1 << (count - 1).bit_length()) >> 2, 1) if count else 1
        return -(-count // step) * step

    num_open, num_decoding = company
    return about(num_open), about(num_decoding)


class AdaptiveDrafting:
    """Chooses between drafting and plain decoding, apart for each kind of company: about (sequences that leave the choice,
    sequences)."""

    def __init__(self) -> None:
        self._comparisons: defaultdict[Company, _Comparison] = defaultdict(_Comparison)

    def choose(self, company: Company) -> bool:
        """Whether this step is to draft."""
        known = self._comparisons[_kind(company)]
        known.num_chosen += 1
        drafting, plain = known.drafting, known.plain
        if drafting.num_steps < MIN_STEPS:
            return True
        if plain.num_steps < MIN_STEPS:
            # In turns, as the moment may be a slow one for both.
            return known.num_chosen % 2 != 0
        better = drafting.rate >= plain.rate
        low, high = sorted((drafting.rate, plain.rate))
        every = CLEAR_EVERY if low < CLEAR_RATIO * high else CLOSE_EVERY
        return better if known.num_chosen % every else not better

    def record(self, company: Company, drafted: bool, tokens: int, seconds: float) -> None:
        """What such a step has yielded. Only of steps that read no prompt."""
        known = self._comparisons[_kind(company)]
        (known.drafting if drafted else known.plain).record(tokens, seconds)
