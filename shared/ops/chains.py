"""The ops of a layer exit, as typed functions: largest logits of the draft vocabulary and confidence head, on CPU and
CUDA, and whole chains of drafts as one op on the CPU: all steps of all sequences in one call, without Python between
them.

`N` tokens of width `D`. Weights are row-major [out, in], each tensor float32, float16 or bfloat16. Sums are in float32.
`distance` [N] is the place of a token's draft in its chain, at least 1. Inference only. The functions raise
`PreconditionFailed` if the library is not built, and `RuntimeError`, which names the argument, for wrong shapes,
dtypes, devices or layouts. `reference` specifies each in PyTorch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from shared.ops import begin_call

ROUTE_TOKENS = 8


def draft_top(x: Tensor, rows: Tensor, bias: Tensor | None = None, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """The k (at most 8) largest of x [N, W] float32 @ rows [V, W].T + bias [V], and the log of the sum of all their
    exps.

    -> values [N, k] float32 descending, indices [N, k] int64, log mass [N] float32. The lower index of
    equal logits comes first. A NaN is never chosen. The logits [N, V] are not stored.
    """
    begin_call(x, rows)
    top: tuple[Tensor, Tensor, Tensor] = torch.ops.neap.draft_top.default(x, rows, bias, k)
    return top


@dataclass(frozen=True)
class ConfidenceWeights:
    """hidden [R, D], bias and output [R], features [3, R], skip [3]. All but `hidden` are float32.

    The gain of the norm is part of `hidden`, its bias part of `bias`, and the slope of a calibration part of `output`,
    `skip` and `shift`.
    """

    hidden: Tensor
    bias: Tensor
    output: Tensor
    features: Tensor
    skip: Tensor
    shift: float
    eps: float

    def held(self) -> list[Tensor | None]:
        """The tensors that it keeps in memory."""
        return [self.hidden, self.bias, self.output, self.features, self.skip]


def new_tickets(num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """The counters that `route` needs for up to `num_tokens` tokens. They are 0 before and after each call.
    One call at a time may use them."""
    tiles = (num_tokens + ROUTE_TOKENS - 1) // ROUTE_TOKENS
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def route(
    x: Tensor,
    weights: ConfidenceWeights,
    top: Tensor,
    log_mass: Tensor,
    distance: Tensor,
    lowest: float,
    highest: float,
    tickets: Tensor,
) -> Tensor:
    """The probability of each token's draft [N] float32 in [lowest, highest], from norm and confidence head.
    One launch on a GPU.

    x [N, D], float32 or of the dtype of `hidden`; top [N, k] and log_mass [N] from `draft_top`; distance [N] int64;
    `tickets` from `new_tickets`.
    """
    begin_call(x)
    probability: Tensor = torch.ops.neap.route.default(
        x,
        weights.hidden,
        weights.bias,
        weights.output,
        weights.features,
        weights.skip,
        top,
        log_mass,
        distance,
        weights.shift,
        weights.eps,
        lowest,
        highest,
        tickets,
    )
    return probability


@dataclass(frozen=True)
class ChainWeights:
    """The weights of head, draft vocabulary and confidence head.
    Letters: D of the states, E of the embedding, W of the head, M of its MLP.

    Packed matrices of any format: `fuse` [W, 3 * D + E], `next` [W, W + E], `gate` and `up` [M, W], `down` [W, M],
    `rows` [Vd, W] and the confidence head's `hidden` [R, W]. `embedding`: all rows of the model [V, E], packed, or
    contiguous float32, float16 or bfloat16. `vocabulary` [Vd] int64: the tokens of `rows`, in [0, V). `norm` and `gain`
    [W] and `bias` [Vd] are float32. `confidence` gives the rest of the confidence head; its own `hidden` is not read.
    """

    fuse: Tensor
    next: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    rows: Tensor
    hidden: Tensor
    embedding: Tensor
    vocabulary: Tensor
    norm: Tensor
    gain: Tensor
    bias: Tensor | None
    confidence: ConfidenceWeights

    def held(self) -> list[Tensor | None]:
        """The tensors that it keeps in memory, but for the embedding, which is the model's."""
        return [*self.matrices, *self.vectors, self.vocabulary]

    @cached_property
    def matrices(self) -> list[Tensor]:
        return [self.fuse, self.next, self.gate, self.up, self.down, self.rows, self.hidden]

    @cached_property
    def vectors(self) -> list[Tensor]:
        confidence = self.confidence
        bias = torch.empty(0) if self.bias is None else self.bias
        features = confidence.features.flatten()
        return [self.norm, self.gain, bias, confidence.bias, confidence.output, features, confidence.skip]


class ChainStart(NamedTuple):
    """Where one sequence's chain begins, and when it ends.

    `tokens`: the tokens that the head has not seen: the sequence's newest one, and drafts that the chain has already.
    The head is fed them, and makes drafts for what follows. `place`: how many tokens of the chain it has seen, 0 if it
    begins with the states of the last settled token. `room` >= 1: the most drafts to make.

    `survival`: the probability that the drafts among `tokens` are right. A draft of probability p multiplies it by
    min(p * `factor`, highest). The chain ends with the first draft after which it is below `least_survival`.

    `entering` [len(tokens), D]: the states of the tokens at the exit's depth. The op reads them from the embedding.

    `begin`: what the chain goes on from: the head's output [W] for the last token that it has seen, or the settled
    states [3, D] if it has seen none. The op takes these apart from the starts.
    """

    tokens: Sequence[int]
    place: int
    room: int
    survival: float
    factor: float
    least_survival: float
    entering: Tensor | None = None
    begin: Tensor | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the head has seen a token of the chain."""
        return self.begin is not None and self.begin.dim() == 1


def chain_lengths(starts: Sequence[ChainStart], probabilities: Tensor, highest: float) -> Tensor:
    """How many drafts of each chain its start allows [N] int64, if all that were made have these `probabilities`
    [N, K]: at least 1."""
    survivals, factors, leasts, rooms = torch.tensor(
        [[start.survival, start.factor, start.least_survival, start.room] for start in starts], dtype=torch.float64
    ).T[..., None]
    survival = survivals * (probabilities * factors).clamp(max=highest).cumprod(1)
    # A probability that is no number ends a chain.
    lives_on = (survival >= leasts)[:, :-1].long().cumprod(1).sum(1)
    return torch.minimum(1 + lives_on, rooms[:, 0].long())


class Chains(NamedTuple):
    """Up to K drafts of each of N sequences: `tokens` [N, K] int64 and `probabilities` [N, K], as the confidence head
    gives them; `lengths` [N] int64: how many there are. `outputs` [N, K, W]: the head's output from which each draft
    was made. Beyond a chain's length a token is -1, and the others are 0."""

    tokens: Tensor
    probabilities: Tensor
    lengths: Tensor
    outputs: Tensor


def draft_chains(
    states: Tensor,
    outputs: Tensor,
    starts: Sequence[ChainStart],
    weights: ChainWeights,
    lowest: float,
    highest: float,
    max_drafts: int,
) -> Chains:
    """Drafts whole chains for F + G sequences, whose `starts` are in this order. -> drafts of up to K = `max_drafts`
    per sequence.

    `states` [F, 3, D]: the three states of each sequence's last settled token. `outputs` [G, W]: for each sequence with
    a chain that has begun, the head's output for the last token that it has seen. Both float32. Probabilities are in
    [lowest, highest]. `chain_reference.draft_chains` specifies the op. A sequence's chain has the same bits in any
    company.
    """
    begin_call(states, outputs)
    confidence = weights.confidence
    columns = [*zip(*starts, strict=True)] or [()] * len(ChainStart._fields)
    tokens, places, rooms, survivals, factors, least_survivals, *_ = columns
    return Chains(
        *torch.ops.neap.draft_chains.default(
            states,
            outputs,
            [*chain.from_iterable(tokens)],
            [*map(len, tokens)],
            places,
            rooms,
            survivals,
            factors,
            least_survivals,
            weights.embedding,
            weights.vocabulary,
            weights.matrices,
            weights.vectors,
            confidence.shift,
            confidence.eps,
            lowest,
            highest,
            max_drafts,
        )
    )
