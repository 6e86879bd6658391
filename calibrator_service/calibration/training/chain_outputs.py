"""What an exit says along chains of the sequence's own tokens, as it is served."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.training.batches import gather_chains
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from shared.ladder.exit_head import ExitHead, chained
from shared.model.runner import captured_depths

# Tokens of a chain on which exits are evaluated and confidence heads are trained.
NUM_PLACES = 4


@dataclass(frozen=True)
class ExitOutputs:
    """An exit at N positions: the LM head's input [N, D] and logits [N, Vd] over the draft vocabulary.

    chain_places [N] int64 >= 1: the drafted tokens' places in their chains. positions [N]: the positions in the chunk
    after which tokens are drafted; choices [N]: the full model's choices there, as indices in the draft vocabulary or
    -1.
    """

    adapted: Tensor
    logits: Tensor
    chain_places: Tensor
    positions: Tensor
    choices: Tensor


@torch.no_grad()
def chain_outputs(
    depth: int, head: ExitHead, chunk: StateChunk, index: Tensor, vocabulary: DraftVocabulary, num_layers: int
) -> Iterator[ExitOutputs]:
    """The exit's outputs at the places 1 to NUM_PLACES of the chains that begin at the positions `index` of a chunk,
    place by place.

    Chains that the sequence's end cuts off are left out. `chunk` must be on the vocabulary's device.
    """
    device, lookup = vocabulary.device, vocabulary.lookup.to(vocabulary.device)
    captured = captured_depths(num_layers)
    chains = gather_chains(chunk, index, NUM_PLACES, (depth,), captured, lookup, device)
    states = chains.states
    for step in range(NUM_PLACES):
        exists = chains.exists[step]
        positions = chains.places[step][exists]
        places = torch.full_like(positions, step + 1)
        output = head(states, chains.entering[depth][step])
        states, adapted = chained(output), head.adapted(output)[exists]
        choices = chains.choices[step][exists]
        yield ExitOutputs(adapted, vocabulary.project(adapted), places, positions, choices)
