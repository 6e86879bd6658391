"""The figures of a ladder on the report split, from which nothing was learned."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from calibrator_service.calibration.report.evaluation import (
    exit_figures,
    table_figures,
    tokens_per_pass,
)
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.states.material import Material
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from shared.ladder.ladder import Ladder
from shared.ladder.rungs import exit_name


def held_out_report(
    run: Run, material: Material, vocabulary: DraftVocabulary, ladder: Ladder
) -> dict[str, Any]:
    """Figures per rung ("rungs") and of the whole ladder, ready for JSON. Raises `Cancelled`."""
    held_out = material.table_sequences["report"]
    rungs = table_figures(ladder, held_out)
    run.report("evaluating", 0.95)
    rungs |= exit_figures(
        ladder, material.chunks["report"], vocabulary, run.spec.label, run.spec.seed
    )
    simulated = tokens_per_pass(ladder, held_out)
    for name, figure in rungs.items():
        for key, value in figure.items():
            if isinstance(value, float):
                run.figures[f"{name}.{key}"] = value
    run.figures.update(simulated)
    run.report("evaluating", 0.99)
    choices = np.concatenate([s.choices[s.first :] for s in held_out])
    is_covered = vocabulary.lookup[torch.from_numpy(choices)] >= 0
    return {
        "rungs": rungs,
        "simulated": simulated,
        "tokens": {**material.num_tokens, "total": sum(material.num_tokens.values())},
        "draft_vocabulary_coverage": float(is_covered.float().mean()),
        "successor_entries": ladder.successors.num_entries if ladder.successors else 0,
        "spec": asdict(run.spec),
        "depths": [exit_name(depth) for depth in run.plan.depths],
    }
