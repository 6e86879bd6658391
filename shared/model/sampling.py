"""How a request wants its next token to be chosen. The choice is repeatable.

Every position of a sequence has its own uniform number, drawn from (seed, position). So a token depends only on the
logits, the tokens before it and the seed, whichever pass computed the logits. To verify a draft, a token is sampled
from the full model's distribution; the draft is accepted if it is that token. A draft of a single token is thus
accepted with probability p(draft), and otherwise the result follows the residual distribution. This is speculative
rejection sampling (Leviathan et al., 2211.17192) coupled to the plain sampler.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from shared.errors import InvalidInput

# Beyond these limits logits overflow: several would be infinite, and no token would be the most probable one.
MIN_TEMPERATURE = 1e-6
MAX_PENALTY = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy decoding. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch the
    respective filter off."""

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

    @property
    def is_plain_greedy(self) -> bool:
        """Greedy, and the choice is the most probable token of the model itself."""
        return self.is_greedy and self.repetition_penalty == 1.0


def uniform_at(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one position of a sequence, from the counter-based generator Philox."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


@dataclass(frozen=True)
class Trial:
    """The rows of logits of one sequence: one per draft and one more.
    Row i predicts the token after `context` and drafts [0, i).

    Row i counts only if all drafts before it are accepted.
    In that case it is the row that plain decoding would compute.

    `margin`: a draft is accepted, too, if the log-probability of the choice exceeds its own by at most this. None: it
    is not. Only greedy trials without a repetition penalty have one.

    `allowed` [n + 1, V] bool, on the host: the tokens that a constraint allows at each row. None: all.
    """

    sampling: SamplingParams
    context: Sequence[int]
    drafts: Sequence[int] = ()
    margin: float | None = None
    allowed: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.drafts) + 1

    def uniform(self, row: int) -> float:
        """The uniform number of the position that row `row` predicts."""
        return uniform_at(self.sampling.seed, len(self.context) + row)
