"""How often exits agree with the full model along chains of drafts: at each place, and where the tables do not help."""

from collections.abc import Sequence

import torch
from torch import Tensor

from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.collect import LabelledSequence
from calibrator_service.calibration.training.chain_outputs import NUM_PLACES, chain_outputs
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.joint import table_positions
from shared.ladder.ladder import Ladder

# Chains at a time.
PASS_SIZE = 1024


def chain_agreement(
    ladder: Ladder, chunks: Sequence[StateChunk], sequences: Sequence[LabelledSequence], vocabulary: DraftVocabulary
) -> dict[str, dict[str, float]]:
    """By exit: "agreement_1" .. "agreement_4", the share of chains whose first .. fourth draft is the full model's
    choice, and "agreement_1_beside_tables" .., the same where the tables' draft is wrong or missing. "positions" and
    "positions_beside_tables": the numbers of chains.

    Every position begins a chain of the sequence's own tokens. `sequences` are those of the chunks, in the same order,
    or the first of them. Choices outside the draft vocabulary count as missed.
    """
    helped = torch.cat([_tables_are_right(ladder, sequence) for sequence in sequences])
    figures: dict[str, dict[str, float]] = {}
    for layer_exit in ladder.exits:
        # [2, NUM_PLACES]: of all chains, and of those that the tables do not help.
        right, counts = torch.zeros(2, NUM_PLACES), torch.zeros(2, NUM_PLACES)
        start = 0
        for stored in chunks:
            chunk = stored.to(vocabulary.device)
            labelled = helped[start : start + len(chunk.usable)]
            beside = ~labelled[chunk.usable[: len(labelled)]]
            start += len(chunk.usable)
            for index in torch.arange(len(beside)).split(PASS_SIZE):
                outputs = chain_outputs(
                    layer_exit.depth, layer_exit.head, chunk, index, vocabulary, ladder.model.num_layers
                )  # fmt: skip
                for place, output in enumerate(outputs):
                    positions = output.positions.cpu()
                    agrees = (output.logits.argmax(-1) == output.choices).cpu()
                    known = positions < len(beside)
                    is_beside = beside[positions[known]]
                    counted = torch.stack([torch.ones_like(is_beside), is_beside])
                    right[:, place] += (counted & agrees[known]).sum(1)
                    counts[:, place] += counted.sum(1)
        overall, beside_tables = (right / counts.clamp(min=1)).tolist()
        exit_figures = figures[layer_exit.name] = {
            "positions": int(counts[0, 0]),
            "positions_beside_tables": int(counts[1, 0]),
        }
        for place in range(NUM_PLACES):
            exit_figures[f"agreement_{place + 1}"] = overall[place]
            exit_figures[f"agreement_{place + 1}_beside_tables"] = beside_tables[place]
    return figures


def _tables_are_right(ladder: Ladder, sequence: LabelledSequence) -> Tensor:
    """Whether the tables' draft is the full model's choice, for the sequence's labelled positions [N] bool."""
    is_right = []
    for drafts, choice in table_positions(ladder, sequence):
        best = max(drafts, key=lambda draft: draft.probability, default=None)
        is_right.append(best is not None and best.token == choice)
    return torch.tensor(is_right, dtype=torch.bool)
