"""Held-out figures: how often each rung is right, and how well its probability knows it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from calibrator_service.calibration.collect import LabelledSequence
from calibrator_service.calibration.spec import Label
from calibrator_service.calibration.state_chunk import StateChunk, read_chunk
from calibrator_service.calibration.train_routers import exit_samples
from shared.ladder.head_rows import projection
from shared.ladder.ladder import Ladder, SequenceDrafter
from shared.ladder.ladder import suffix_evidence as judge_suffix
from shared.ladder.rungs import SUCCESSOR, SUFFIX
from shared.model.runner import Runner

CONFIDENT = 0.5
# Bounds of rung 0's drafts per deep pass that the report simulates.
DRAFT_BOUNDS = (1, 3, 5)
WORTH_DRAFTING = 0.3
BINS = 10

Floats = npt.NDArray[np.float64]


def router_figures(probability: Floats, agreed: npt.NDArray[np.bool_]) -> dict[str, float]:
    """AUC, Brier score, precision at CONFIDENT and expected calibration error of N probabilities; 0 where undefined."""
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
    """Area under the ROC curve: the chance that a right draft has the higher probability, ties half. 0.5 for one class only."""
    positives = int(agreed.sum())
    negatives = len(agreed) - positives
    if not positives or not negatives:
        return 0.5
    _, inverse, counts = np.unique(probability, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[agreed].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def calibration_error(probability: Floats, agreed: npt.NDArray[np.bool_]) -> float:
    """Mean distance of probability and share of agreement over BINS equal bins, weighted by their size."""
    which = np.minimum((probability * BINS).astype(int), BINS - 1)
    error = 0.0
    for b in range(BINS):
        members = which == b
        if members.any():
            error += members.mean() * abs(probability[members].mean() - agreed[members].mean())
    return float(error)


def reliability(probability: Floats, agreed: npt.NDArray[np.bool_]) -> list[dict[str, float]]:
    """The reliability diagram's bins: mean probability, share of agreement, count."""
    which = np.minimum((probability * BINS).astype(int), BINS - 1)
    return [
        {
            "probability": float(probability[which == b].mean()),
            "agreement": float(agreed[which == b].mean()),
            "count": int((which == b).sum()),
        }
        for b in range(BINS)
        if (which == b).any()
    ]


def _rung(
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
    """Figures of rung 0 for first drafts at every held-out position: suffix, successor (its best order), by name."""
    found: dict[str, tuple[list[float], list[bool]]] = {SUFFIX: ([], []), SUCCESSOR: ([], [])}
    num_positions = 0
    only_table = Ladder(ladder.model, None, ladder.successors, ladder.successor_router)
    for sequence in sequences:
        tokens, choices = sequence.tokens.tolist(), sequence.choices.tolist()
        both = SequenceDrafter(ladder, tokens[: sequence.first + 1])
        table = SequenceDrafter(only_table, tokens[: sequence.first + 1])
        for at in range(sequence.first, len(tokens)):
            if at > sequence.first:
                both.append(tokens[at : at + 1])
                table.append(tokens[at : at + 1])
            num_positions += 1
            suffix, successors = both.table_matches(())
            if suffix is not None and ladder.suffix_router is not None:
                evidence = judge_suffix(suffix, successors, 0)
                found[SUFFIX][0].append(ladder.suffix_router.probability(evidence))
                found[SUFFIX][1].append(suffix.token == choices[at])
            draft = table.table_draft(())
            if draft is not None:
                found[SUCCESSOR][0].append(draft.probability)
                found[SUCCESSOR][1].append(draft.token == choices[at])
    return {
        name: _rung(np.array(probability), np.array(agreed, dtype=np.bool_), num_positions)
        for name, (probability, agreed) in found.items()
        if name in ladder.rung_names
    }


def tokens_per_pass(ladder: Ladder, sequences: Sequence[LabelledSequence]) -> dict[str, float]:
    """Simulated decoding with rung 0 alone: tokens per deep pass with at most 1, 3 and 5 drafts worth making, in one chain."""
    figures = {}
    for bound in DRAFT_BOUNDS:
        num_tokens = num_passes = 0
        for sequence in sequences:
            tokens = sequence.tokens.tolist()
            if sequence.first == 0 and not _is_own_text(sequence):
                continue  # given text: the model would not have gone on like this
            drafter = SequenceDrafter(ladder, tokens[: sequence.first + 1])
            at = sequence.first
            while at + 1 < len(tokens):
                drafted: list[int] = []
                while len(drafted) < bound and at + len(drafted) + 1 < len(tokens):
                    draft = drafter.table_draft(drafted)
                    if draft is None or draft.probability < WORTH_DRAFTING:
                        break
                    drafted.append(draft.token)
                right = 0
                while right < len(drafted) and drafted[right] == tokens[at + 1 + right]:
                    right += 1
                final = min(right + 1, len(tokens) - at - 1)
                drafter.append(tokens[at + 1 : at + 1 + final])
                at += final
                num_tokens, num_passes = num_tokens + final, num_passes + 1
        if num_passes:
            figures[f"rung0.tokens_per_pass_{bound}"] = num_tokens / num_passes
    return figures


def _is_own_text(sequence: LabelledSequence) -> bool:
    return bool((sequence.choices[:-1] == sequence.tokens[1:]).all())


def exit_figures(
    ladder: Ladder,
    runner: Runner,
    chunks: Sequence[Path],
    rows: Tensor,
    bias: Tensor | None,
    lookup: Tensor,
    label: Label,
    seed: int,
    read: Callable[[Path], StateChunk] = read_chunk,
) -> dict[str, dict[str, object]]:
    """Figures of the layer exits over the report split. Agreement is the token's, whatever the routers' label."""
    figures = {}
    project = projection(rows, bias)
    for layer_exit in ladder.exits:

        def samples(kind: Label, layer_exit=layer_exit):  # type: ignore[no-untyped-def]
            return exit_samples(
                layer_exit.depth, layer_exit.head, chunks, project, lookup, kind,
                seed=seed, device=runner.loaded.device, read=read,
            )  # fmt: skip

        labelled = samples(label)
        with torch.no_grad():
            probability = torch.cat(
                [
                    layer_exit.router(a.float(), s)
                    for a, s in zip(
                        labelled.adapted.split(4096), labelled.scalars.split(4096), strict=True
                    )
                ]
            )
        agreed = labelled.label.numpy()
        figure = _rung(probability.double().numpy(), agreed, len(agreed))
        if label == "cosine":
            figure["agreement"] = float(samples("agreement").label.float().mean())
        figures[layer_exit.name] = figure
    return figures
