"""The op of whole chains in plain PyTorch: see `shared.ops.chains.draft_chains`. Written for reading, not for speed."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.ops import reference
from shared.ops.chains import ChainStart, ChainWeights


def step(joined: Tensor, weights: ChainWeights) -> Tensor:
    """The head's output [W] from its joined input [W]. Here and below, the matrices of `weights` are not packed."""
    eps = weights.confidence.eps
    normed = reference.norm(joined, eps) * weights.norm
    gated = F.silu(weights.gate @ normed) * (weights.up @ normed)
    return reference.norm(joined + weights.down @ gated, eps)


def draft(output: Tensor, distance: int, weights: ChainWeights, lowest: float, highest: float) -> tuple[int, float]:
    """The draft of an output [W] and its probability.
    `distance`: tokens of the chain up to the one that gave the output."""
    confidence, adapted = weights.confidence, (output * weights.gain)[None]
    top, indices, log_mass = reference.draft_top(adapted, weights.rows, weights.bias)
    probability = reference.route(
        adapted, weights.hidden, confidence.bias, confidence.output, confidence.features, confidence.skip,
        top, log_mass, torch.tensor([distance]), confidence.shift, confidence.eps, lowest, highest,
    )  # fmt: skip
    return int(weights.vocabulary[indices[0, 0]]), float(probability)


def draft_chain(
    states: Tensor | None,
    output: Tensor | None,
    start: ChainStart,
    weights: ChainWeights,
    lowest: float,
    highest: float,
) -> tuple[list[int], list[float], list[Tensor]]:
    """Tokens, probabilities and outputs of one sequence, from its states [3, D] or from the last output [W] of its
    chain."""
    eps = weights.confidence.eps
    tokens: list[int] = []
    probabilities: list[float] = []
    outputs: list[Tensor] = []
    pending, survival, distance = list(start.tokens), start.survival, start.place
    while pending:
        row = reference.norm(weights.embedding[pending.pop(0)], eps)
        if output is None:
            assert states is not None
            joined = weights.fuse @ torch.cat([*reference.norm(states, eps), row])
        else:
            joined = weights.next @ torch.cat([output, row])
        output = step(joined, weights)
        distance += 1
        if pending:
            continue
        token, probability = draft(output, distance, weights, lowest, highest)
        tokens, probabilities, outputs = ([*tokens, token], [*probabilities, probability], [*outputs, output])
        survival *= min(probability * start.factor, highest)
        if len(tokens) < start.room and survival >= start.least_survival:
            pending.append(token)
    return tokens, probabilities, outputs


def draft_chains(
    states: Tensor,
    outputs: Tensor,
    starts: Sequence[ChainStart],
    weights: ChainWeights,
    lowest: float,
    highest: float,
    max_drafts: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [N, K], probabilities [N, K], lengths [N] and outputs [N, K, W]: each sequence by itself."""
    fresh, count, width = len(states), len(starts), weights.next.shape[0]
    tokens = torch.full((count, max_drafts), -1)
    probabilities = torch.zeros(count, max_drafts)
    lengths = torch.zeros(count, dtype=torch.int64)
    reached = torch.zeros(count, max_drafts, width)
    for number, start in enumerate(starts):
        begun = number >= fresh
        drafts, chances, each = draft_chain(
            None if begun else states[number],
            outputs[number - fresh] if begun else None,
            start,
            weights,
            lowest,
            highest,
        )
        lengths[number] = length = len(drafts)
        tokens[number, :length] = torch.tensor(drafts)
        probabilities[number, :length] = torch.tensor(chances)
        reached[number, :length] = torch.stack(each)
    return tokens, probabilities, lengths, reached
