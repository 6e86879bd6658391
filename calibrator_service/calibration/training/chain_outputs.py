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
class ExitOutputs:
    """An exit at N positions: the LM head's input [N, W] and logits [N, Vd] over the draft vocabulary.

    distances [N] int64: of the last settled token, as `ExitHead.forward` takes them; for a chained exit the drafted tokens' places
    in their chains. positions [N]: the positions in the chunk after which tokens are drafted; choices [N]: the full model's choices
    there, as indices in the draft vocabulary or -1.
    """

    adapted: Tensor
    logits: Tensor
    distances: Tensor
    positions: Tensor
    choices: Tensor


@torch.no_grad()
def chain_outputs(
    depth: int,
    head: ExitHead | FusedHead,
    chunk: StateChunk,
    index: Tensor,
    vocabulary: DraftVocabulary,
    num_layers: int,
) -> Iterator[ExitOutputs]:
    """The exit's outputs at the places 1 to NUM_PLACES of the chains that begin at the positions `index` of a chunk, place by place.

    Chains that the sequence's end cuts off are left out. `chunk` must be on the vocabulary's device.
    """
    device, lookup = vocabulary.device, vocabulary.lookup.to(vocabulary.device)
    is_fused = isinstance(head, FusedHead)
    kept, depths = (tap_depths(num_layers), (depth,)) if is_fused else ((), ())
    chains = gather_chains(chunk, index, NUM_PLACES, depths, kept, lookup, device)
    states = chains.states
    for step in range(NUM_PLACES):
        exists = chains.exists[step]
        positions = chains.places[step][exists]
        places = torch.full_like(positions, step + 1)
        if isinstance(head, FusedHead):
            output = head(states, chains.entering[depth][step])
            states, adapted = chained(output), head.adapted(output)[exists]
            choices = chains.choices[step][exists]
            yield ExitOutputs(adapted, vocabulary.project(adapted), places, positions, choices)
        else:
            yield outputs_at(depth, head, chunk, positions, places, vocabulary)


@torch.no_grad()
def outputs_at(
    depth: int,
    head: ExitHead,
    chunk: StateChunk,
    positions: Tensor,
    distances: Tensor,
    vocabulary: DraftVocabulary,
) -> ExitOutputs:
    """The outputs of an exit that does not continue chains, with the last settled token `distances` [N] positions back."""
    device = vocabulary.device
    batch = gather_batch(chunk, positions, distances, vocabulary.lookup.to(device), device)
    adapted = head(batch.states[depth], batch.deep, batch.distance)
    logits = vocabulary.project(adapted)
    return ExitOutputs(adapted, logits, batch.distance, positions.to(device), batch.choices)
