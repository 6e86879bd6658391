"""Batches of chains: what an exit would see along them while serving, gathered from a chunk of states."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrator_service.calibration.states.chunk import StateChunk


@dataclass(frozen=True)
class ChainBatch:
    """B chains of K tokens each, all of them the sequence's own.
    The first token of a chain is the one after its settled prefix.

    states [B, 3, D]: of the last settled token at the kept depths and L; entering: depth -> [K, B, D], the tokens'
    states there; deep [K, B, D]: their states at depth L, from which the full model chooses; choices [K, B] int64:
    those choices, as indices in the draft vocabulary, -1 if they are outside it or the sequence has ended; places [K,
    B] int64: indices of the tokens' positions in the chunk; exists [K, B]: False where the sequence has ended.
    """

    states: Tensor
    entering: dict[int, Tensor]
    deep: Tensor
    choices: Tensor
    places: Tensor
    exists: Tensor


def gather_chains(
    chunk: StateChunk,
    index: Tensor,
    num_steps: int,
    depths: Sequence[int],
    kept_depths: Sequence[int],
    lookup: Tensor,
    device: torch.device,
) -> ChainBatch:
    """The chains whose first tokens are at the positions `index` [B] of a chunk, for exits at `depths`.

    `chunk` and `lookup` [V] must be on `device`; `index` may be anywhere.
    """
    first = index.to(device)
    steps = torch.arange(num_steps, device=device)[:, None]
    places = (first + steps).clamp(max=len(chunk) - 1)
    # Rows of one sequence follow each other, and no two sequences touch: see `states.collect`.
    exists = chunk.rows[places] == chunk.rows[first] + steps
    places = torch.where(exists, places, first)
    rows, settled = chunk.rows[places], chunk.rows[first] - 1
    captured = [chunk.states[depth][settled].float() for depth in kept_depths]
    choices = lookup[chunk.choices[places]]
    return ChainBatch(
        states=torch.stack([*captured, chunk.deep[settled].float()], -2),
        entering={depth: chunk.states[depth][rows].float() for depth in depths},
        deep=chunk.deep[rows],
        choices=torch.where(exists, choices, -1),
        places=places,
        exists=exists,
    )
