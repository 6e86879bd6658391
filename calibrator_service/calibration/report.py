"""The last phase: what a ladder does on the split that nothing was learnt from."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from calibrator_service.calibration.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.evaluate import exit_figures, table_figures, tokens_per_pass
from calibrator_service.calibration.material import Material
from calibrator_service.calibration.run import Run
from shared.ladder.ladder import Ladder
from shared.ladder.rungs import exit_name
from shared.model.runner import Runner


def held_out_report(
    run: Run, runner: Runner, material: Material, vocabulary: DraftVocabulary, ladder: Ladder
) -> dict[str, Any]:
    """Figures per rung ("rungs") and of the whole, JSON-able. Raises `Cancelled`."""
    held_out = material.judged["report"]
    rungs = table_figures(ladder, held_out)
    run.tell("evaluating", 0.95)
    rungs |= exit_figures(
        ladder,
        runner,
        material.chunks("report"),
        vocabulary.rows,
        vocabulary.bias,
        vocabulary.lookup,
        run.spec.label,
        run.spec.seed,
        material.read,
    )
    simulated = tokens_per_pass(ladder, held_out)
    for name, figure in rungs.items():
        for key, value in figure.items():
            if isinstance(value, float):
                run.figures[f"{name}.{key}"] = value
    run.figures.update(simulated)
    run.tell("evaluating", 0.99)
    choices = np.concatenate([s.choices[s.first :] for s in held_out])
    covered = vocabulary.lookup[torch.from_numpy(choices)] >= 0
    return {
        "rungs": rungs,
        "simulated": simulated,
        "tokens": {**material.num_tokens, "total": sum(material.num_tokens.values())},
        "draft_vocabulary_coverage": float(covered.float().mean()),
        "successor_entries": ladder.successors.num_entries if ladder.successors else 0,
        "spec": asdict(run.spec),
        "depths": [exit_name(depth) for depth in run.plan.depths],
    }
