"""What the policies of one model learn from its own answers: state maps, exits, and which layers to leave out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.skip.maps import MapFit, Pair, StateMap
from bench.skip.passes import Uniform
from bench.skip.scores import recorded
from bench.skip.text import learn, similarity
from calibrator_service.calibration.text.shards import TokenSequence
from shared.model.contiguous_runner import ContiguousRunner

# Numbers of layers that are left out. Sequences that decide between blocks of them, and blocks that they decide between.
NUM_DROPPED = (1, 2, 3, 5)
JUDGES, CANDIDATES = 6, 3
RANK = 64
DRAFT_VOCABULARY = 8192


@dataclass(frozen=True)
class Learnt:
    """`maps` and `low_rank`: from every exit's depth to all deeper ones, and (`maps` alone) over every block. `vocabulary` [Vd]: what
    exits may propose, ascending. `blocks`: the layers to leave out, one block per number of NUM_DROPPED. `num_tokens`: learnt from."""

    depths: Sequence[int]
    maps: dict[Pair, StateMap]
    low_rank: dict[Pair, StateMap]
    vocabulary: Tensor
    blocks: list[range]
    num_tokens: int

    @classmethod
    def of(
        cls,
        runner: ContiguousRunner,
        text: Sequence[TokenSequence],
        depths: Sequence[int],
        num_tokens: int,
    ) -> "Learnt":
        """Exits at `depths`. Maps learn from the first answers of `text` with `num_tokens` tokens together, prompts included."""
        training = first_answers(text, num_tokens)
        blocks = best_blocks(runner, training[:JUDGES])
        leaving = [(d, deeper) for d in depths for deeper in range(d + 1, runner.num_layers + 1)]
        pairs = {*leaving, *((block.start, block.stop) for block in blocks)}
        fit = MapFit(pairs, runner.loaded.hidden_size)
        learn(runner, training, fit)
        return cls(
            depths,
            {pair: fit.solve(pair) for pair in pairs},
            {pair: fit.solve(pair, RANK) for pair in leaving},
            frequent_tokens(text),
            blocks,
            sum(one.num_answer_tokens for one in training),
        )


def best_blocks(runner: ContiguousRunner, judges: Sequence[TokenSequence]) -> list[range]:
    """Of the blocks whose states before and after are the most similar (Gromov et al., 2403.17887), those that agree most."""
    cosines = similarity(runner, judges)
    blocks = []
    for count in NUM_DROPPED:
        starts = range(1, runner.num_layers - count)
        similar = sorted(starts, key=lambda start: -float(cosines[start, start + count]))
        agreement = {
            start: recorded(runner, without(runner, range(start, start + count)), judges).agreement
            for start in similar[:CANDIDATES]
        }
        start = max(agreement, key=agreement.__getitem__)
        blocks.append(range(start, start + count))
    return blocks


def without(
    runner: ContiguousRunner, layers: Sequence[int], patch: StateMap | None = None
) -> Uniform:
    return Uniform([i for i in range(runner.num_layers) if i not in layers], patch)


def frequent_tokens(text: Sequence[TokenSequence]) -> Tensor:
    """The DRAFT_VOCABULARY most frequent tokens of answers, ascending."""
    answers = [token for one in text for token in one.tokens[one.answer_start :]]
    tokens, counts = torch.tensor(answers).unique(return_counts=True)
    frequent: Tensor = tokens[counts.argsort(descending=True)[:DRAFT_VOCABULARY]]
    return frequent.sort().values


def first_answers(text: Sequence[TokenSequence], num_tokens: int) -> list[TokenSequence]:
    """As many of the first answers as have `num_tokens` tokens together."""
    chosen: list[TokenSequence] = []
    for one in text:
        if num_tokens > 0:
            chosen.append(one)
            num_tokens -= one.num_answer_tokens
    return chosen
