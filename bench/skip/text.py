"""What the policies learn from, and what they are judged on: the full model's own greedy answers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.skip.maps import MapFit
from bench.skip.passes import Batch, Uniform
from calibrator_service.calibration.states.collect import padded
from calibrator_service.calibration.text.shards import TokenSequence
from shared.ladder.unit import unit
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.ragged import RaggedSequence

# Tokens of a pass.
PASS_TOKENS = 1536


def groups(sequences: Sequence[TokenSequence]) -> Iterator[list[TokenSequence]]:
    """Sequences of similar length, about PASS_TOKENS tokens together."""
    group: list[TokenSequence] = []
    for sequence in sorted(sequences, key=lambda one: len(one.tokens)):
        if group and (len(group) + 1) * len(sequence.tokens) > PASS_TOKENS:
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


def similarity(runner: ContiguousRunner, sequences: Sequence[TokenSequence]) -> Tensor:
    """Mean cosine between a position's states at two depths, [L + 1, L + 1], over the answers."""
    depths = range(runner.num_layers + 1)
    total, count = torch.zeros(len(depths), len(depths)), 0
    for group in groups(sequences):
        states = runner.capture(padded(group), list(depths))
        for row, sequence in enumerate(group):
            span = slice(sequence.answer_start, len(sequence.tokens))
            units = torch.stack([unit(states[depth][row, span]) for depth in depths], 1)
            total += torch.einsum("nid,njd->ij", units, units) / units.shape[-1]
            count += len(units)
    return total / count


def learn(runner: ContiguousRunner, sequences: Sequence[TokenSequence], fit: MapFit) -> None:
    """Adds the states of all positions to `fit`."""
    for group in groups(sequences):
        states = runner.capture(padded(group), fit.depths)
        for row, sequence in enumerate(group):
            fit.add({depth: states[depth][row, : len(sequence.tokens)] for depth in states})


def recorded_batches(
    runner: ContiguousRunner, sequences: Sequence[TokenSequence], *, prompts_leave: bool = False
) -> Iterator[tuple[Batch, Tensor]]:
    """Whole sequences as batches, each with the positions [T] bool that choose a token of an answer. Those may leave, or with
    `prompts_leave` all positions of the prompts but the first and the last."""
    for group in groups(sequences):
        ids = torch.tensor([[token for sequence in group for token in sequence.tokens]])
        answers, prompts = (torch.zeros(ids.shape[1], dtype=torch.bool) for _ in range(2))
        start, ragged = 0, []
        for sequence in group:
            first, count = start + sequence.answer_start, len(sequence.tokens)
            answers[first - 1 : start + count - 1] = True
            prompts[start + 1 : first - 1] = True
            ragged.append(RaggedSequence(runner.new_cache(count), 0, count))
            start += count
        yield Batch(ids, ragged, prompts if prompts_leave else answers), answers


def full(runner: ContiguousRunner) -> Uniform:
    return Uniform(range(runner.num_layers))
