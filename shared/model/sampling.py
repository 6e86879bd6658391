"""How a request wants its next token chosen, repeatably.

Every position of a sequence draws its own uniform number from (seed, position). A token is then a function of the logits, the
tokens before it and the seed alone, whichever pass computed the logits. So verifying a draft is: sample as the full model would,
accept if that is the draft. For a draft that is a single token this accepts with probability p(draft) and otherwise yields the
residual distribution, which is speculative rejection sampling (Leviathan et al., 2211.17192) coupled to the plain sampler.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidInput

# Beyond these, logits overflow: several would be infinite, and no token the most probable.
MIN_TEMPERATURE = 1e-6
MAX_PENALTY = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch the filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise InvalidInput(
                f"temperature is {self.temperature}; it must be 0, for greedy, or finite and at least {MIN_TEMPERATURE}"
            )
        if self.top_k < 0:
            raise InvalidInput(f"top_k is {self.top_k}; it must not be negative")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidInput(f"top_p is {self.top_p}; it must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidInput(f"min_p is {self.min_p}; it must be in [0, 1]")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise InvalidInput(
                f"repetition_penalty is {self.repetition_penalty}; it must be in [{1 / MAX_PENALTY}, {MAX_PENALTY}]"
            )
        if not 0 <= self.seed < 2**64:
            raise InvalidInput(f"seed is {self.seed}; it must be in [0, 2^64)")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def uniform_at(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that belongs to one position of a sequence (Philox, counter-based)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


@dataclass(frozen=True)
class Trial:
    """One sequence's rows of logits, one per draft and one more: row i is what follows `context` and the drafts before i.

    That is what the full model's own row would be wherever row i counts: it does only if all drafts before it were right.
    """

    sampling: SamplingParams
    context: Sequence[int]
    drafts: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        return len(self.drafts) + 1

    def uniform(self, row: int) -> float:
        """The number that decides what is drawn at a row."""
        return uniform_at(self.sampling.seed, len(self.context) + row)
