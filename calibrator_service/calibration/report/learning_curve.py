"""What more text is worth: the agreement of exits that learned from parts of the text, beside that of the published ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calibrator_service.calibration.report.chain_agreement import chain_agreement
from calibrator_service.calibration.states.training_data import TrainingData
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from shared.ladder.fused_head import FusedHead
from shared.ladder.ladder import Ladder


def learning_curve(
    material: TrainingData,
    vocabulary: DraftVocabulary,
    ladder: Ladder,
    curve: Mapping[int, Mapping[int, FusedHead]],
) -> list[dict[str, Any]]:
    """One entry per amount of text, ascending; the last is the ladder itself. "tokens": those of the heads split that the exits
    learned from; "exits": what `chain_agreement` found by exit, on the report split. Tables and draft vocabulary are the ladder's.

    `curve`: tokens -> depth -> head.
    """
    chunks, sequences = material.chunks["report"], material.table_sequences["report"]
    judged = {material.num_tokens["heads"]: ladder}
    for tokens, heads in curve.items():
        exits = tuple(replace(one, head=heads[one.depth]) for one in ladder.exits)
        judged[tokens] = replace(ladder, exits=exits)
    return [
        {"tokens": tokens, "exits": chain_agreement(one, chunks, sequences, vocabulary)}
        for tokens, one in sorted(judged.items())
    ]
