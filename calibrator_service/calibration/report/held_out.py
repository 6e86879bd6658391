"""The figures of a ladder on the report split, from which nothing was learned."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog
import torch

from calibrator_service.calibration.report.chain_agreement import chain_agreement
from calibrator_service.calibration.report.metrics import rung_figures
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import Label
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.collect import LabelledSequence
from calibrator_service.calibration.states.training_data import TrainingData
from calibrator_service.calibration.training.confidence import exit_samples
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.tables import labelled_positions
from shared.ladder.ladder import Ladder
from shared.ladder.rungs import NGRAM_TABLE, PROMPT_LOOKUP
from shared.ladder.table_confidence import lookup_bins

log = structlog.get_logger("neap.calibration")

# Figures from fewer positions of the report split than this prove nothing.
LEAST_POSITIONS = 50
# Samples per call of a confidence head.
PASS_SIZE = 4096


def held_out_report(
    run: CalibrationRun, material: TrainingData, vocabulary: DraftVocabulary, ladder: Ladder
) -> dict[str, Any]:
    """Figures per rung ("rungs") and of the whole ladder, ready for JSON. Raises `Cancelled`."""
    held_out = material.table_sequences["report"]
    rungs = table_figures(ladder, held_out)
    run.report("evaluating", 0.95)
    rungs |= exit_figures(ladder, material.chunks["report"], vocabulary, run.spec.label)
    along_chains = chain_agreement(ladder, material.chunks["report"], held_out, vocabulary)
    for name, figures in along_chains.items():
        log.info("agreement along chains", rung=name, **figures)
        rungs[name] |= figures
    for name, figure in rungs.items():
        for key, value in figure.items():
            if isinstance(value, float | int):
                run.figures[f"{name}.{key}"] = value
    run.report("evaluating", 0.99)
    choices = np.concatenate([s.choices[s.first :] for s in held_out])
    is_covered = vocabulary.lookup[torch.from_numpy(choices)] >= 0
    return {
        "rungs": rungs,
        "commonest_token": float(np.bincount(choices).max() / len(choices)),
        "tokens": {**material.num_tokens, "total": sum(material.num_tokens.values())},
        "draft_vocabulary_coverage": float(is_covered.float().mean()),
        "left_out": dict(run.plan.left_out),
    }


def table_figures(ladder: Ladder, sequences: Sequence[LabelledSequence]) -> dict[str, dict[str, object]]:
    """Figures of the table rungs by name, for the first draft at every position; of the n-gram table its best order."""
    samples: dict[str, tuple[list[float], list[bool]]] = {PROMPT_LOOKUP: ([], []), NGRAM_TABLE: ([], [])}
    num_positions = 0
    only_ngrams = Ladder(ladder.model, None, ladder.ngrams, ladder.ngram_confidence)
    for sequence in sequences:
        for (both, _, choice), (ngram, _, _) in zip(
            labelled_positions(ladder, sequence), labelled_positions(only_ngrams, sequence), strict=True
        ):
            num_positions += 1
            lookup, ngrams = both.matches(())
            if lookup is not None and ladder.lookup_confidence is not None:
                bins = lookup_bins(lookup, ngrams, 0)
                samples[PROMPT_LOOKUP][0].append(ladder.lookup_confidence.probability(bins))
                samples[PROMPT_LOOKUP][1].append(lookup.token == choice)
            draft = ngram.best(())
            if draft is not None:
                samples[NGRAM_TABLE][0].append(draft.probability)
                samples[NGRAM_TABLE][1].append(draft.token == choice)
    return {
        name: rung_figures(np.array(probability), np.array(agreed, dtype=np.bool_), num_positions)
        for name, (probability, agreed) in samples.items()
        if name in ladder.rung_names
    }


def exit_figures(
    ladder: Ladder, chunks: Sequence[StateChunk], vocabulary: DraftVocabulary, label: Label
) -> dict[str, dict[str, object]]:
    """Figures of the layer exits by name. Agreement is that of the token, whichever label the confidence heads were
    trained with."""
    figures = {}
    for layer_exit in ladder.exits:
        depth, head = layer_exit.depth, layer_exit.head
        layers = ladder.model.num_layers
        samples = exit_samples(depth, head, chunks, vocabulary, layers, label)
        parts = zip(samples.adapted.split(PASS_SIZE), samples.scalars.split(PASS_SIZE), strict=True)
        with torch.no_grad():
            probability = torch.cat([layer_exit.confidence(a.float(), s) for a, s in parts])
        agreed = samples.label.numpy()
        figure = rung_figures(probability.double().numpy(), agreed, len(agreed))
        if label == "cosine":
            by_token = exit_samples(depth, head, chunks, vocabulary, layers, "agreement")
            figure["agreement"] = float(by_token.label.float().mean())
        figures[layer_exit.name] = figure
    return figures
