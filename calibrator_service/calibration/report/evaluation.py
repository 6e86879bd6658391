"""Held-out figures: how often each rung is right, and how well its router's probability predicts it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from calibrator_service.calibration.spec import Label
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.collect import LabelledSequence
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.routers import exit_samples
from shared.ladder.ladder import Ladder, SequenceDrafter, suffix_evidence
from shared.ladder.rungs import SUCCESSOR, SUFFIX

# Probability from which on a draft counts as confident.
CONFIDENT = 0.5
# Simulated limits on the table rungs' drafts per deep pass, and the probability from which on a draft is made.
DRAFT_LIMITS = (1, 3, 5)
MIN_DRAFT_PROBABILITY = 0.3
# Equal bins of probability in a reliability diagram.
NUM_BINS = 10
# Samples per call of a router.
PASS_SIZE = 4096

Floats = npt.NDArray[np.float64]


def router_figures(probability: Floats, agreed: npt.NDArray[np.bool_]) -> dict[str, float]:
    """AUC, Brier score, precision at CONFIDENT and expected calibration error of N probabilities [N] and outcomes [N]; 0 if N is 0."""
    if len(agreed) == 0:
        return {"router_auc": 0.0, "router_brier": 0.0, "router_precision": 0.0, "router_ece": 0.0}
    confident = agreed[probability >= CONFIDENT]
    return {
        "router_auc": auc(probability, agreed),
        "router_brier": float(np.mean((probability - agreed) ** 2)),
        "router_precision": float(confident.mean()) if len(confident) else 0.0,
        "router_ece": calibration_error(probability, agreed),
    }


def auc(probability: Floats, agreed: npt.NDArray[np.bool_]) -> float:
    """Area under the ROC curve: the chance that a right draft has a higher probability than a wrong one, ties counted half.

    0.5 if all drafts are right or all are wrong.
    """
    positives = int(agreed.sum())
    negatives = len(agreed) - positives
    if not positives or not negatives:
        return 0.5
    _, inverse, counts = np.unique(probability, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[agreed].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def calibration_error(probability: Floats, agreed: npt.NDArray[np.bool_]) -> float:
    """Expected calibration error: mean difference of probability and share of agreement over the bins, weighted by their size."""
    which = np.minimum((probability * NUM_BINS).astype(int), NUM_BINS - 1)
    error = 0.0
    for b in range(NUM_BINS):
        members = which == b
        if members.any():
            error += members.mean() * abs(probability[members].mean() - agreed[members].mean())
    return float(error)


def reliability(probability: Floats, agreed: npt.NDArray[np.bool_]) -> list[dict[str, float]]:
    """The bins of the reliability diagram that have samples: mean probability, share of agreement, count."""
    which = np.minimum((probability * NUM_BINS).astype(int), NUM_BINS - 1)
    return [
        {
            "probability": float(probability[which == b].mean()),
            "agreement": float(agreed[which == b].mean()),
            "count": int((which == b).sum()),
        }
        for b in range(NUM_BINS)
        if (which == b).any()
    ]


def _rung_figures(
    probability: Floats, agreed: npt.NDArray[np.bool_], num_positions: int
) -> dict[str, object]:
    return {
        "agreement": float(agreed.sum()) / max(num_positions, 1),
        "coverage": len(agreed) / max(num_positions, 1),
        "agreement_when_proposed": float(agreed.mean()) if len(agreed) else 0.0,
        **router_figures(probability, agreed),
        "reliability": reliability(probability, agreed),
    }


def table_figures(
    ladder: Ladder, sequences: Sequence[LabelledSequence]
) -> dict[str, dict[str, object]]:
    """Figures of the table rungs by name, for the first draft at every position; of the successor table its best order."""
    found: dict[str, tuple[list[float], list[bool]]] = {SUFFIX: ([], []), SUCCESSOR: ([], [])}
    num_positions = 0
    only_successors = Ladder(ladder.model, None, ladder.successors, ladder.successor_router)
    for sequence in sequences:
        tokens, choices = sequence.tokens.tolist(), sequence.choices.tolist()
        both = SequenceDrafter(ladder, tokens[: sequence.first + 1])
        successor = SequenceDrafter(only_successors, tokens[: sequence.first + 1])
        for position in range(sequence.first, len(tokens)):
            if position > sequence.first:
                both.append(tokens[position : position + 1])
                successor.append(tokens[position : position + 1])
            num_positions += 1
            suffix, successors = both.table_matches(())
            if suffix is not None and ladder.suffix_router is not None:
                evidence = suffix_evidence(suffix, successors, 0)
                found[SUFFIX][0].append(ladder.suffix_router.probability(evidence))
                found[SUFFIX][1].append(suffix.token == choices[position])
            draft = successor.table_draft(())
            if draft is not None:
                found[SUCCESSOR][0].append(draft.probability)
                found[SUCCESSOR][1].append(draft.token == choices[position])
    return {
        name: _rung_figures(np.array(probability), np.array(agreed, dtype=np.bool_), num_positions)
        for name, (probability, agreed) in found.items()
        if name in ladder.rung_names
    }


def tokens_per_pass(ladder: Ladder, sequences: Sequence[LabelledSequence]) -> dict[str, float]:
    """Simulated decoding with the table rungs alone: tokens per deep pass with at most 1, 3 and 5 drafts in one chain."""
    figures = {}
    for limit in DRAFT_LIMITS:
        num_tokens = num_passes = 0
        for sequence in sequences:
            tokens = sequence.tokens.tolist()
            if sequence.first == 0 and not _is_greedy(sequence):
                continue  # given text: the model would have continued differently
            drafter = SequenceDrafter(ladder, tokens[: sequence.first + 1])
            settled = sequence.first
            while settled + 1 < len(tokens):
                drafted: list[int] = []
                while len(drafted) < limit and settled + len(drafted) + 1 < len(tokens):
                    draft = drafter.table_draft(drafted)
                    if draft is None or draft.probability < MIN_DRAFT_PROBABILITY:
                        break
                    drafted.append(draft.token)
                num_right = 0
                while (
                    num_right < len(drafted)
                    and drafted[num_right] == tokens[settled + 1 + num_right]
                ):
                    num_right += 1
                num_final = min(num_right + 1, len(tokens) - settled - 1)
                drafter.append(tokens[settled + 1 : settled + 1 + num_final])
                settled += num_final
                num_tokens, num_passes = num_tokens + num_final, num_passes + 1
        if num_passes:
            figures[f"rung0.tokens_per_pass_{limit}"] = num_tokens / num_passes
    return figures


def _is_greedy(sequence: LabelledSequence) -> bool:
    """Whether every token of the sequence is the full model's choice."""
    return bool((sequence.choices[:-1] == sequence.tokens[1:]).all())


def exit_figures(
    ladder: Ladder,
    chunks: Sequence[StateChunk],
    vocabulary: DraftVocabulary,
    label: Label,
    seed: int,
) -> dict[str, dict[str, object]]:
    """Figures of the layer exits by name. Agreement is that of the token, whichever label the routers were trained with."""
    figures = {}
    for layer_exit in ladder.exits:
        depth, head = layer_exit.depth, layer_exit.head
        samples = exit_samples(depth, head, chunks, vocabulary, label, seed=seed)
        parts = zip(samples.adapted.split(PASS_SIZE), samples.scalars.split(PASS_SIZE), strict=True)
        with torch.no_grad():
            probability = torch.cat([layer_exit.router(a.float(), s) for a, s in parts])
        agreed = samples.label.numpy()
        figure = _rung_figures(probability.double().numpy(), agreed, len(agreed))
        if label == "cosine":
            by_token = exit_samples(depth, head, chunks, vocabulary, "agreement", seed=seed)
            figure["agreement"] = float(by_token.label.float().mean())
        figures[layer_exit.name] = figure
    return figures
