"""Adaptive drafting: measures whether steps with drafts give more tokens per second than plain decoding.

The planner weighs drafts by costs that were measured at start-up, and looking up drafts takes time that it does not
count. If many sequences share a pass, drafts save little, and these two errors can exceed the saving. Plain decoding is
then faster.
"""

from collections import defaultdict
from dataclasses import dataclass, field

# Steps over which the exponential averages extend.
WINDOW_STEPS = 64.0
# Steps of each kind that are measured before the two kinds are compared.
MIN_STEPS = 8
# The slower kind is tried again every n-th step: often if the two rates are close, seldom if it is clearly slower.
CLOSE_EVERY, CLEAR_EVERY = 16, 64
CLEAR_RATIO = 0.93

# (sequences for which the engine may choose whether to draft, sequences that decode in the step).
BatchShape = tuple[int, int]


@dataclass
class _Throughput:
    """Tokens and seconds of one kind of step. Older steps weigh less."""

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
    drafting: _Throughput = field(default_factory=_Throughput)
    plain: _Throughput = field(default_factory=_Throughput)
    num_chosen: int = 0


def _bucket(shape: BatchShape) -> BatchShape:
    """Batches of nearly the same size share their measurements, because sequences come and go within a few steps."""

    def rounded_up(count: int) -> int:
        step = max((1 << (count - 1).bit_length()) >> 2, 1) if count else 1
        return -(-count // step) * step

    num_adaptive, num_decoding = shape
    return rounded_up(num_adaptive), rounded_up(num_decoding)


class AdaptiveDrafting:
    """Chooses between drafting and plain decoding, separately for each rounded `BatchShape`."""

    def __init__(self) -> None:
        self._comparisons: defaultdict[BatchShape, _Comparison] = defaultdict(_Comparison)

    def choose(self, shape: BatchShape) -> bool:
        """Whether the next step of such a batch drafts."""
        known = self._comparisons[_bucket(shape)]
        known.num_chosen += 1
        drafting, plain = known.drafting, known.plain
        if drafting.num_steps < MIN_STEPS:
            return True
        if plain.num_steps < MIN_STEPS:
            # Alternately, so that a slow moment of the machine affects both kinds.
            return known.num_chosen % 2 != 0
        better = drafting.rate >= plain.rate
        low, high = sorted((drafting.rate, plain.rate))
        every = CLEAR_EVERY if low < CLEAR_RATIO * high else CLOSE_EVERY
        return better if known.num_chosen % every else not better

    def record(self, shape: BatchShape, drafted: bool, tokens: int, seconds: float) -> None:
        """Records the tokens and the duration of a step. Call it only for steps that prefill no prompt."""
        known = self._comparisons[_bucket(shape)]
        (known.drafting if drafted else known.plain).record(tokens, seconds)
