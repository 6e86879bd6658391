"""What an exit says along chains of the sequence's own tokens, as it is served."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from shared.ladder.exit_head import ExitHead, chained
from shared.model.runner import captured_depths


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
