"""Choosing the next token from the full model's logits, repeatably.

Every position of a sequence draws its own uniform number from (seed, position). A token is then a function of the logits, the
tokens before it and the seed alone, whichever pass computed the logits. So verifying a draft is: sample as the full model would,
accept if that is the draft. For a draft that is a single token this accepts with probability p(draft) and otherwise yields the
residual distribution, which is speculative rejection sampling (Leviathan et al., 2211.17192) coupled to the plain sampler.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.errors import InvalidInput
from shared.ops import library
from shared.ops.batches import verify_sampled

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


def penalised(logits: Tensor, params: SamplingParams, context: Sequence[int]) -> Tensor:
    """Logits [V] after the repetition penalty (Keskar et al., 1909.05858) over the tokens of `context`."""
    if params.repetition_penalty == 1.0 or not context:
        return logits
    seen = torch.tensor(sorted(set(context)), device=logits.device)
    scores = logits[seen]
    scores = torch.where(
        scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
    )
    return logits.index_copy(0, seen, scores)


def distribution(logits: Tensor, params: SamplingParams, context: Sequence[int]) -> Tensor:
    """Probabilities [V], float64, after penalty, temperature, top-k, top-p and min-p, in Hugging Face's order.

    `logits` [V], any float dtype. Only for sampling: `params.temperature` must be positive.
    """
    scores = penalised(logits, params, context).double() / params.temperature
    if 0 < params.top_k < scores.shape[0]:
        kth = torch.topk(scores, params.top_k).values[-1]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if params.top_p < 1.0:
        ordered, order = torch.sort(scores, descending=True, stable=True)
        probabilities = torch.softmax(ordered, -1)
        # A token stays while the mass before it is below top_p, so the most probable always does.
        dropped = probabilities.cumsum(-1) - probabilities >= params.top_p
        scores = scores.index_fill(0, order[dropped], -math.inf)
    if params.min_p > 0.0:
        probabilities = torch.softmax(scores, -1)
        scores = scores.masked_fill(probabilities < params.min_p * probabilities.max(), -math.inf)
    return torch.softmax(scores, -1)


def uniform_at(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that belongs to one position of a sequence (Philox, counter-based)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def choose(logits: Tensor, params: SamplingParams, context: Sequence[int]) -> int:
    """The token that follows `context` (all tokens so far, prompt included), from logits [V]."""
    if params.is_greedy:
        return int(penalised(logits, params, context).argmax())
    weights = distribution(logits, params, context)
    uniform = uniform_at(params.seed, len(context))
    if library.runs_on(weights.device.type):
        # No draft, one sequence of one row.
        draft, starts = torch.tensor([-1]), torch.tensor([0, 1])
        place = torch.tensor([uniform], dtype=torch.float64)
        device = weights.device
        chosen, _ = verify_sampled(
            weights[None], draft.to(device), starts.to(device), place.to(device)
        )
        return int(chosen)
    cumulative = weights.cumsum(-1)
    token = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    # Rounding may put the point past the last token that has any mass.
    return min(token, int(torch.searchsorted(cumulative, cumulative[-1])))
