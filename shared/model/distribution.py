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

# Where the host reads a tensor for nothing, what is computed may follow from what was: a row whose draft before it was wrong is not
# made a distribution of, and only what may be in a nucleus is sorted. Elsewhere either would be a wait per row, which costs more
# than what is computed in vain. Both ways give the same tokens.
_READ_FOR_NOTHING = frozenset({"cpu"})
_MANTISSA_BITS = 53


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


def masses(logits: Tensor, trials: Sequence[Trial]) -> Tensor:
    """Logits [T, V] -> [T, V] float64: whole numbers in proportion to the probabilities.

    After penalty, temperature, top-k, top-p and min-p, in Hugging Face's order. Only for sampling: temperatures must be positive.
    """
    params = [trial.sampling for trial in trials for _ in range(trial.num_rows)]
    temperature, top_p, min_p = _on_device(
        [[[getattr(own, name)] for own in params] for name in ("temperature", "top_p", "min_p")],
        logits.device,
        torch.float64,
    )
    # The temperature changes no order, so the k-th largest and the sorted order are those of the logits.
    scores = _top_k(penalised(logits, trials), params)
    unit = unit_mass(logits.shape[-1])
    found = scores.to(torch.float64, copy=True)
    found = found.sub_(found.amax(-1, keepdim=True)).div_(temperature).exp_().mul_(unit).round_()
    if any(own.top_p < 1.0 for own in params):
        found = _top_p(found, scores, top_p, params)
    if any(own.min_p > 0.0 for own in params):
        # A share of the most probable token's, which is in every nucleus and has the unit.
        found = found.masked_fill_(found < min_p * unit, 0.0)
    return found


def drawn(masses: Tensor, uniforms: Tensor) -> Tensor:
    """The token [T] int64 at each row's uniform number [T] float64 of its masses [T, V], in PyTorch: where there are no kernels."""
    running, total = masses.cumsum(-1), masses.sum(-1, keepdim=True)
    tokens = torch.searchsorted(running, uniforms[:, None] * total, right=True)
    # Rounding may put the point past the last token that has any mass.
    return torch.minimum(tokens, torch.searchsorted(running, total))[:, 0]


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


def _top_k(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores [T, V], those below a row's k-th largest put to -inf."""
    filtered = [row for row, own in enumerate(params) if 0 < own.top_k < scores.shape[1]]
    if not filtered:
        return scores
    counts = [params[row].top_k for row in filtered]
    rows, last = _on_device([filtered, [count - 1 for count in counts]], scores.device, torch.int64)
    own = scores.index_select(0, rows)
    kth = own.topk(max(counts)).values.gather(1, last[:, None])
    return scores.index_copy(0, rows, own.masked_fill(own < kth, -math.inf))


def _top_p(
    found: Tensor, scores: Tensor, top_p: Tensor, params: Sequence[SamplingParams]
) -> Tensor:
    """Masses [T, V], those outside a row's nucleus put to 0. scores [T, V] say what is more probable; top_p [T, 1]."""
    filtered = [row for row, own in enumerate(params) if own.top_p < 1.0]
    rows = _on_device(filtered, found.device, torch.int64)
    own, order, bound = (t.index_select(0, rows) for t in (found, scores, top_p))
    bound *= own.sum(-1, keepdim=True)
    if is_read_for_nothing(found.device):
        kept = torch.cat(
            [
                _small_nucleus(*row)
                for row in zip(own.split(1), order.split(1), bound.split(1), strict=True)
            ]
        )
    else:
        kept = _nucleus(own, order, bound)
    return found.index_copy_(0, rows, kept)


def _nucleus(found: Tensor, scores: Tensor, bound: Tensor) -> Tensor:
    """Masses [n, V], 0 where those of the tokens before it, from the most probable on, come to `bound` [n, 1]: never the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ordered = found.gather(1, order)
    before = ordered.cumsum(-1) - ordered
    return found.scatter(1, order, ordered.masked_fill_(before >= bound, 0.0))


def _small_nucleus(found: Tensor, scores: Tensor, bound: Tensor) -> Tensor:
    """`_nucleus` of one row [1, V], sorting only what may be in it: some hundred numbers, and sorting is most of what a row costs.

    All that are left out come to half of what the nucleus leaves over at most, so what is before any of them reaches the bound.
    """
    left_over = found.sum(-1, keepdim=True) - bound
    likely = (found > left_over / (2 * found.shape[1]))[0].nonzero()[:, 0]
    kept = _nucleus(found.index_select(1, likely), scores.index_select(1, likely), bound)
    return torch.zeros_like(found).index_copy_(1, likely, kept)


def _on_device(values: object, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Not waited for: the copy is ordered with what reads it.
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
