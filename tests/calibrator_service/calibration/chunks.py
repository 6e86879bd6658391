"""Chunks of states without a model."""

import torch

from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.moments import MomentsLayout
from shared.ladder.exit_head import unit

SIZE = 8
LAYOUT = MomentsLayout(SIZE, 0, (2, 4))


def random_chunk(lengths: tuple[int, ...] = (12, 7), seed: int = 0) -> StateChunk:
    """Independent states of sequences with these numbers of rows. The first row of each is only settled."""
    generator = torch.Generator().manual_seed(seed)

    def states() -> torch.Tensor:
        return unit(torch.randn(sum(lengths), SIZE, generator=generator)).half()

    return chunk_of({depth: states() for depth in (0, 2, 4)}, states(), lengths)


def chunk_of(states: dict[int, torch.Tensor], deep: torch.Tensor, lengths: tuple[int, ...]) -> StateChunk:
    """The chunk of these states [R, D]. `lengths`: rows of each sequence."""
    rows, start = [], 0
    for length in lengths:
        rows += range(start + 1, start + length)
        start += length
    return StateChunk(
        states, deep, torch.tensor(rows), torch.zeros(len(rows)).long(), {}, torch.ones(len(rows), dtype=torch.bool)
    )
