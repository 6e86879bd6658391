"""Distributions to draw tokens from, for all rows of a step at once, each with the same bits however many there are.

What a sum of floating-point numbers comes to depends on the order they are added in, and PyTorch orders by shape and address: on a
GPU the running sum of [1, V] is another algorithm than that of [3, V] and not even the same twice, and a softmax divides a row among
threads by where it starts, which at an odd V is elsewhere for every row. So masses here are whole numbers that come to at most 2^53
a row: float64 adds them exactly, in whichever order. All else is done number by number, or is a row's largest, its k-th largest or
its stable order, of which there is one each.

No number is read from a device where that is a wait: there, shapes follow from the requests alone.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.model.sampling import SamplingParams, Trial

_MANTISSA_BITS = 53
# Where the host reads a tensor for nothing, what is computed may follow from what was. Elsewhere that is a wait for the device.
_READ_FOR_NOTHING = frozenset({"cpu"})


def is_read_for_nothing(device: torch.device) -> bool:
    """Whether the host may look at a tensor of this device without waiting for one."""
    return device.type in _READ_FOR_NOTHING


def unit_mass(vocabulary_size: int) -> float:
    """The mass of a row's most probable token: the largest power of two of which V make at most 2^53.

    At V 49,152 a token less than 3.6e-12 times as probable as that one is never drawn.
    """
    return 2.0 ** (_MANTISSA_BITS - (vocabulary_size - 1).bit_length())


def penalised(logits: Tensor, trials: Sequence[Trial]) -> Tensor:
    """Logits [T, V] of the trials' rows after the repetition penalty (Keskar et al., 1909.05858); the same tensor if none has one."""
    if all(trial.sampling.repetition_penalty == 1.0 for trial in trials):
        return logits
    rows = logits.split([trial.num_rows for trial in trials])
    return torch.cat([_penalised(own, trial) for own, trial in zip(rows, trials, strict=True)])


def candidates(logits: Tensor, trials: Sequence[Trial]) -> tuple[Tensor, Tensor]:
    """Logits [T, V] of the trials' rows -> scores [T, V] after the penalty, masses [T, V] after temperature and top-k.

    Only for sampling: temperatures must be positive.
    """
    scores = penalised(logits, trials)
    params = [trial.sampling for trial in trials for _ in range(trial.num_rows)]
    temperature = _column([own.temperature for own in params], logits.device)
    masses = scores.to(torch.float64, copy=True)
    masses.sub_(scores.amax(-1, keepdim=True)).div_(temperature).exp_()
    masses.mul_(unit_mass(scores.shape[1])).round_()
    # The temperature changes no order, so the k-th largest and the sorted order are those of the scores.
    if any(own.top_k for own in params):
        masses.masked_fill_(scores < _kth_largest(scores, [own.top_k for own in params]), 0.0)
    return scores, masses


def nucleus(scores: Tensor, masses: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What `candidates` gave, or rows of it, and each row's parameters -> masses [T, V] after top-p and min-p.

    With that a row is in proportion to the probabilities that Hugging Face's processors give, in their order.
    """
    kept = masses
    if any(own.top_p < 1.0 for own in params):
        kept = _top_p(scores, masses, [own.top_p for own in params])
    if any(own.min_p for own in params):
        # A share of the most probable token's, which is in every nucleus and has the unit.
        least = _column([own.min_p for own in params], masses.device) * unit_mass(masses.shape[1])
        kept = kept.masked_fill(kept < least, 0.0)
    return kept


def drawn(masses: Tensor, uniforms: Tensor) -> Tensor:
    """The token [T] int64 at each row's uniform number [T] float64 of its masses [T, V], in PyTorch: where there are no kernels."""
    running, total = masses.cumsum(-1), masses.sum(-1, keepdim=True)
    tokens = torch.searchsorted(running, uniforms[:, None] * total, right=True)
    # Rounding may put the point past the last token that has any mass. (Nothing is found among NaNs.)
    last = torch.searchsorted(running, total).clamp_(max=masses.shape[1] - 1)
    return torch.minimum(tokens, last)[:, 0]


def _penalised(logits: Tensor, trial: Trial) -> Tensor:
    """Logits [n, V] of one trial."""
    penalty = trial.sampling.repetition_penalty
    if penalty == 1.0:
        return logits
    # The first row that has seen a token: a draft counts from the row that follows it.
    since = dict.fromkeys(trial.context, 0)
    for row, draft in enumerate(trial.drafts, 1):
        since.setdefault(draft, row)
    seen, first = _on_device([[*since], [*since.values()]], logits.device, torch.int64)
    scores = logits.index_select(1, seen)
    lowered = torch.where(scores > 0, scores / penalty, scores * penalty)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    return logits.index_copy(1, seen, torch.where(first <= rows, lowered, scores))


def _kth_largest(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """[T, V] -> [T, 1]: of each row the number that `counts` of it reach; -inf where that is 0, or more than there are."""
    size = scores.shape[1]
    used = [count if count < size else 0 for count in counts]
    last, unused = _on_device(
        [[[max(count - 1, 0)] for count in used], [[count == 0] for count in used]],
        scores.device,
        torch.int64,
    )
    largest = scores.topk(max(*used, 1)).values
    return largest.gather(1, last).masked_fill_(unused.bool(), -math.inf)


def _top_p(scores: Tensor, masses: Tensor, shares: Sequence[float]) -> Tensor:
    """Masses [T, V], those outside a row's nucleus put to 0."""
    rows = [row for row, share in enumerate(shares) if share < 1.0]
    if len(rows) < len(shares):  # sorting is dear: only rows that ask for it
        index = _on_device(rows, masses.device, torch.int64)
        own = _top_p(
            scores.index_select(0, index),
            masses.index_select(0, index),
            [shares[row] for row in rows],
        )
        return masses.index_copy(0, index, own)
    bound = masses.sum(-1, keepdim=True) * _column(shares, masses.device)
    if not is_read_for_nothing(masses.device):
        return _within(scores, masses, bound)
    parts = (part.split(1) for part in (scores, masses, bound))
    return torch.cat([_within_sorting_few(*row) for row in zip(*parts, strict=True)])


def _within(scores: Tensor, masses: Tensor, bound: Tensor) -> Tensor:
    """Masses [n, V], 0 where those of the tokens before it, from the most probable on, come to `bound` [n, 1]: never the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ordered = masses.gather(1, order)
    before = ordered.cumsum(-1) - ordered
    return masses.scatter(1, order, ordered.masked_fill_(before >= bound, 0.0))


def _within_sorting_few(scores: Tensor, masses: Tensor, bound: Tensor) -> Tensor:
    """`_within` of one row [1, V], sorting only what may be in it: some hundred numbers, and sorting is most of what a row costs."""
    # By octaves: all in those above come before any in this one. The exponent alone, for a NaN may have a sign.
    octaves = (masses[0].view(torch.int64) >> (_MANTISSA_BITS - 1)) & 0x7FF
    from_top = torch.bincount(octaves, weights=masses[0]).flip(0).cumsum(0)
    num_octaves = torch.searchsorted(from_top, bound[0]) + 1
    few = (octaves >= len(from_top) - num_octaves).nonzero()[:, 0]
    kept = _within(scores.index_select(1, few), masses.index_select(1, few), bound)
    return torch.zeros_like(masses).index_copy_(1, few, kept)


def _column(numbers: Sequence[float], device: torch.device) -> Tensor:
    """[T, 1] float64."""
    return _on_device(numbers, device, torch.float64)[:, None]


def _on_device(values: object, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Not waited for: the copy is ordered with what reads it.
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
