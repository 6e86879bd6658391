"""What an exit says along chains of the sequence's own tokens, as it is served."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.training.batches import gather_batch, gather_chains
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from shared.ladder.fused_head import FusedHead, chained
from shared.ladder.heads import NUM_OFFSETS, ExitHead
from shared.model.runner import tap_depths

# Tokens of a chain on which exits are evaluated and routers are trained.
NUM_PLACES = NUM_OFFSETS


@dataclass(frozen=True)
class PlaceOutputs:
    """An exit at one place of N chains: the LM head's input [N, W] and logits [N, Vd] over the draft vocabulary.

    positions [N]: the position in the chunk after which each token is drafted; choices [N]: the full model's choice there, an index
    in the draft vocabulary or -1. `place` counts from 1. Chains that the sequence's end cuts off are left out.
    """

    place: int
    adapted: Tensor
    logits: Tensor
    positions: Tensor
    choices: Tensor

    @property
    def places(self) -> Tensor:
        """`place` for each chain [N] int64."""
        return torch.full_like(self.positions, self.place)


@torch.no_grad()
def chain_outputs(
    depth: int,
    head: ExitHead | FusedHead,
    chunk: StateChunk,
    index: Tensor,
    vocabulary: DraftVocabulary,
    num_layers: int,
) -> Iterator[PlaceOutputs]:
    """The exit's outputs at places 1 to NUM_PLACES of the chains that begin at the positions `index` of a chunk.

    `chunk` must be on the vocabulary's device.
    """
    device, lookup = vocabulary.device, vocabulary.lookup.to(vocabulary.device)
    is_fused = isinstance(head, FusedHead)
    kept = tap_depths(num_layers) if is_fused else ()
    depths = (depth,) if is_fused else ()
    chains = gather_chains(chunk, index, NUM_PLACES, depths, kept, lookup, device)
    states = chains.states
    for step in range(NUM_PLACES):
        positions, exists = chains.places[step], chains.exists[step]
        if isinstance(head, FusedHead):
            output = head(states, chains.entering[depth][step])
            states, adapted = chained(output), head.adapted(output)
        else:
            distance = torch.full_like(positions, step + 1)
            batch = gather_batch(chunk, positions, distance, lookup, device)
            adapted = head(batch.states[depth], batch.deep, batch.distance)
        adapted = adapted[exists]
        yield PlaceOutputs(
            step + 1,
            adapted,
            vocabulary.project(adapted),
            positions[exists],
            chains.choices[step][exists],
        )
