"""Log-probabilities of chosen tokens. They are computed on the logits' device and read together with the step's other
results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at one token, under the full model without constraint, penalty or temperature.
    `alternatives`: (token id, value), largest value first."""

    value: float
    alternatives: tuple[tuple[int, float], ...]


def logprobs(logits: Tensor, tokens: Tensor, num_alternatives: int) -> Tensor:
    """logits [n, V] float32, tokens [n] int64 -> [n, 1 + 2 * num_alternatives] float64.
    `logprobs_from_row` reads a row.

    The row of a token that is NO_TOKEN says nothing.
    """
    values = logits.log_softmax(-1)
    parts = [values.gather(1, tokens.clamp(min=0)[:, None])]
    if num_alternatives:
        top = values.topk(num_alternatives)
        parts += [top.values, top.indices]
    return torch.cat([part.double() for part in parts], dim=1)


def logprobs_from_row(numbers: Sequence[float]) -> Logprobs:
    """The log-probabilities in a row that `logprobs` returned."""
    half = len(numbers) // 2
    values, tokens = numbers[1 : 1 + half], numbers[1 + half :]
    return Logprobs(numbers[0], tuple(zip(map(int, tokens), values, strict=True)))
