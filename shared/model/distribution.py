"""Distributions to draw tokens from, for all rows of a step at once. The bits of a row do not depend on the other rows.

The result of a floating-point sum depends on the order of the additions, and PyTorch chooses the order by shape and
address. On a GPU the running sum of [1, V] is another algorithm than that of [3, V], and it is not even the same in two
calls. A softmax divides a row among threads by the row's address, which at an odd V differs from row to row. So the
masses here are whole numbers whose sum is at most 2^53 per row: float64 adds them exactly in any order. All other
operations are elementwise, or have a unique result: a row's largest number, its k-th largest, its stable order.

Where reading a tensor on the host would wait for the device, none is read: there, all shapes follow from the requests
alone.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.model.context_counts import ContextCounts, Counts, before_rows
from shared.model.sampling import AllowedTokens, SamplingParams, Trial
from shared.ops import NO_TOKEN

_MANTISSA_BITS = 53
# Devices whose tensors the host reads without a synchronisation.
# There, what is computed next may depend on the numbers.
DEVICES_READ_WITHOUT_SYNC = frozenset({"cpu"})


def reads_without_sync(device: torch.device) -> bool:
    """Whether the host reads tensors of this device without waiting for the device."""
    return device.type in DEVICES_READ_WITHOUT_SYNC


def unit_mass(vocabulary_size: int) -> float:
    """The mass of a row's most probable token: the largest power of two u with V * u <= 2^53.

    At V 49,152 a token less than 3.6e-12 times as probable as that one is never drawn.
    """
    return 2.0 ** (_MANTISSA_BITS - (vocabulary_size - 1).bit_length())


def constrained(logits: Tensor, trials: Sequence[Trial]) -> Tensor:
    """Logits [T, V] of the trials' rows, -inf for tokens that a constraint does not allow. The same tensor if no trial
    has one."""
    if all(trial.allowed is None for trial in trials):
        return logits
    rows = logits.split([trial.num_rows for trial in trials])
    return torch.cat(
        [
            row_logits
            if trial.allowed is None
            else row_logits.where(_masks(trial.allowed, trial.num_rows, row_logits.device), -math.inf)
            for row_logits, trial in zip(rows, trials, strict=True)
        ]
    )


def _masks(allowed: AllowedTokens, num_rows: int, device: torch.device) -> Tensor:
    """[num_rows, V] bool."""
    masks = np.stack([allowed.mask(row) for row in range(num_rows)])
    return torch.from_numpy(masks).to(device, non_blocking=True)


def penalised(logits: Tensor, trials: Sequence[Trial]) -> Tensor:
    """Logits [T, V] of the trials' rows after all that changes scores: biases, penalties and forbidden tokens. The
    same tensor if no trial has any."""
    if not any(trial.sampling.changes_scores for trial in trials):
        return logits
    scores = logits.clone()
    rows = scores.split([trial.num_rows for trial in trials])
    for trial_scores, trial in zip(rows, trials, strict=True):
        _penalise(trial_scores, trial)
    return scores


def candidates(logits: Tensor, trials: Sequence[Trial]) -> tuple[Tensor, Tensor]:
    """Logits [T, V] of the trials' rows -> scores [T, V] after the penalty, masses [T, V] after temperature and top-k.

    Only for sampling: temperatures must be positive.
    """
    scores = penalised(logits, trials)
    params = [trial.sampling for trial in trials for _ in range(trial.num_rows)]
    masses = masses_of(scores, _column([sampling.temperature for sampling in params], logits.device))
    # The temperature changes no order, so the k-th largest and the sorted order are those of the scores.
    if any(sampling.top_k for sampling in params):
        masses.masked_fill_(scores < _kth_largest(scores, [sampling.top_k for sampling in params]), 0.0)
    return scores, masses


def masses_of(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Scores [T, V] and positive temperatures [T, 1] float64 -> masses [T, V] float64."""
    masses = scores.to(torch.float64, copy=True)
    masses.sub_(scores.amax(-1, keepdim=True)).div_(temperatures).exp_()
    return masses.mul_(unit_mass(scores.shape[1])).round_()


def nucleus(scores: Tensor, masses: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Masses [T, V] after top-p and min-p. `scores`, `masses`: results of `candidates`, or rows of them.
    `params`: one per row.

    A row of the result is proportional to the probabilities that Hugging Face's logits processors give, in their order.
    """
    remaining = masses
    if any(sampling.top_p < 1.0 for sampling in params):
        remaining = _top_p(scores, masses, [sampling.top_p for sampling in params])
    if any(sampling.min_p for sampling in params):
        # A share of the mass of the most probable token, which is in every nucleus and has `unit_mass`.
        least = _column([sampling.min_p for sampling in params], masses.device) * unit_mass(masses.shape[1])
        remaining = remaining.masked_fill(remaining < least, 0.0)
    return remaining


def drawn(masses: Tensor, uniforms: Tensor) -> Tensor:
    """The token [T] int64 of each row at its uniform number. masses [T, V], uniforms [T] float64.
    In PyTorch, for devices without kernels.

    NO_TOKEN for a row whose sum is not finite.
    """
    running, total = masses.cumsum(-1), masses.sum(-1, keepdim=True)
    tokens = torch.searchsorted(running, uniforms[:, None] * total, right=True)
    # Rounding may put the point past the last token that has any mass.
    last = torch.searchsorted(running, total)
    return torch.where(total.isfinite(), torch.minimum(tokens, last), NO_TOKEN)[:, 0]


def _penalise(scores: Tensor, trial: Trial) -> None:
    """Changes the scores [n, V] of a trial, in the order of transformers and vLLM: biases, penalties, forbidden tokens.

    The repetition penalty (Keskar et al., 1909.05858) is of prompt and answer. Those that OpenAI's API has are of the
    answer alone.
    """
    sampling, device = trial.sampling, scores.device
    counted = trial.counts or ContextCounts(sampling, trial.context, trial.num_prompt_tokens, scores.shape[1])
    if sampling.logit_bias:
        tokens = _on_device([*sampling.logit_bias], device, torch.int64)
        biases = _on_device([*sampling.logit_bias.values()], device, torch.float32)
        scores.index_copy_(1, tokens, scores.index_select(1, tokens) + biases)
    if sampling.repetition_penalty != 1.0:
        seen, counts = _before(counted.whole, trial, device)
        seen_scores, penalty = scores.index_select(1, seen), sampling.repetition_penalty
        lowered = torch.where(seen_scores > 0, seen_scores / penalty, seen_scores * penalty)
        scores.index_copy_(1, seen, torch.where(counts > 0, lowered, seen_scores))
    if sampling.presence_penalty or sampling.frequency_penalty:
        seen, counts = _before(counted.answer, trial, device)
        lowered = scores.index_select(1, seen) - counts * sampling.frequency_penalty
        lowered -= (counts > 0) * sampling.presence_penalty
        scores.index_copy_(1, seen, lowered)
    if forbidden := trial.forbidden():
        rows, tokens = _on_device(forbidden, device, torch.int64).T
        scores.index_put_((rows, tokens), scores.new_full((), -math.inf))


def _before(counts: Counts | None, trial: Trial, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens [m] int64 that are penalised, and how often each stands before each row [n, m] float32."""
    assert counts is not None
    seen, rows = before_rows(counts, trial.drafts)
    return _on_device(seen, device, torch.int64), _on_device(rows, device, torch.float32)


def _kth_largest(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """scores [T, V] -> [T, 1]: the k-th largest of each row, k from `counts`. -inf where k is 0 or at least V."""
    size = scores.shape[1]
    used = [count if count < size else 0 for count in counts]
    last, unused = _on_device(
        [[[max(count - 1, 0)] for count in used], [[count == 0] for count in used]], scores.device, torch.int64
    )
    largest = scores.topk(max(*used, 1)).values
    return largest.gather(1, last).masked_fill_(unused.bool(), -math.inf)


def _top_p(scores: Tensor, masses: Tensor, shares: Sequence[float]) -> Tensor:
    """Masses [T, V], set to 0 outside each row's nucleus."""
    rows = [row for row, share in enumerate(shares) if share < 1.0]
    if len(rows) < len(shares):  # sorting is expensive, so only rows that ask for top-p are sorted
        index = _on_device(rows, masses.device, torch.int64)
        cut = _top_p(scores.index_select(0, index), masses.index_select(0, index), [shares[row] for row in rows])
        return masses.index_copy(0, index, cut)
    bound = masses.sum(-1, keepdim=True) * _column(shares, masses.device)
    return _within(scores, masses, bound)


def _within(scores: Tensor, masses: Tensor, bound: Tensor) -> Tensor:
    """Masses [n, V], set to 0 where the more probable tokens already sum to `bound` [n, 1] or more.
    The most probable token is kept."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ordered = masses.gather(1, order)
    before = ordered.cumsum(-1) - ordered
    return masses.scatter(1, order, ordered.masked_fill_(before >= bound, 0.0))


def _column(numbers: Sequence[float], device: torch.device) -> Tensor:
    """[T, 1] float64."""
    return _on_device(numbers, device, torch.float64)[:, None]


def _on_device(values: object, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Nothing waits for the copy: the device orders it before the operations that read it.
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)
