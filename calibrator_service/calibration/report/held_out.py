"""The figures of a ladder on the report split, from which nothing was learned.

How often each proposer's draft is right, and how well its probability predicts that; for exits also along chains
of drafts, at each place and where the tables do not help; for the joint probability, by situation.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import Label
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.collect import LabelledSequence
from calibrator_service.calibration.states.training_data import TrainingData
from calibrator_service.calibration.training.chain_outputs import NUM_PLACES, chain_outputs
from calibrator_service.calibration.training.confidence import exit_samples
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.joint import Position, table_positions
from calibrator_service.calibration.training.tables import labelled_positions
from shared.ladder.confidence import Confidence
from shared.ladder.exit_head import ExitHead
from shared.ladder.joint_weights import JointWeights
from shared.ladder.ladder import Ladder
from shared.ladder.proposers import NGRAM_TABLE, PROMPT_LOOKUP, exit_name

log = structlog.get_logger("neap.calibration")

# Figures from fewer positions of the report split than this prove nothing.
LEAST_POSITIONS = 50
# Samples per call of a confidence head.
PASS_SIZE = 4096


def held_out_report(
    run: CalibrationRun, material: TrainingData, vocabulary: DraftVocabulary, ladder: Ladder
) -> dict[str, Any]:
    """Figures per proposer ("proposers") and of the whole ladder, ready for JSON. Raises `Cancelled`."""
    held_out = material.table_sequences["report"]
    proposers = table_figures(ladder, held_out)
    run.report("evaluating", 0.95)
    proposers |= exit_figures(ladder, material.chunks["report"], vocabulary, run.spec.label)
    heads = {layer_exit.depth: layer_exit.head for layer_exit in ladder.exits}
    helped, layers = tables_are_right(ladder, held_out), run.loaded.num_layers
    for depth, figures in chain_agreement(helped, heads, material.chunks["report"], vocabulary, layers).items():
        name = exit_name(depth)
        log.info("agreement along chains", proposer=name, **figures)
        proposers[name] |= figures
    for name, figure in proposers.items():
        for key, value in figure.items():
            if isinstance(value, float | int):
                run.figures[f"{name}.{key}"] = value
    run.report("evaluating", 0.99)
    choices = np.concatenate([s.choices[s.first :] for s in held_out])
    is_covered = vocabulary.lookup[torch.from_numpy(choices)] >= 0
    return {
        "proposers": proposers,
        "commonest_token": float(np.bincount(choices).max() / len(choices)),
        "tokens": {**material.num_tokens, "total": sum(material.num_tokens.values())},
        "draft_vocabulary_coverage": float(is_covered.float().mean()),
        "left_out": dict(run.plan.left_out),
    }


def table_figures(ladder: Ladder, sequences: Sequence[LabelledSequence]) -> dict[str, dict[str, object]]:
    """Figures of the table proposers by name, for the first draft at every position; of the n-gram table its best
    order."""
    samples: dict[str, tuple[list[float], list[bool]]] = {PROMPT_LOOKUP: ([], []), NGRAM_TABLE: ([], [])}
    num_positions = 0
    only_ngrams = Ladder(ladder.model, None, ladder.ngrams, ladder.ngram_confidence)
    for sequence in sequences:
        for (both, _, choice), (ngram, _, _) in zip(
            labelled_positions(ladder, sequence), labelled_positions(only_ngrams, sequence), strict=True
        ):
            num_positions += 1
            lookup = next((each for each in both.propose() if each.proposer == PROMPT_LOOKUP), None)
            if lookup is not None:
                samples[PROMPT_LOOKUP][0].append(lookup.probability)
                samples[PROMPT_LOOKUP][1].append(lookup.token == choice)
            draft = max(ngram.propose(), key=lambda each: each.probability, default=None)
            if draft is not None:
                samples[NGRAM_TABLE][0].append(draft.probability)
                samples[NGRAM_TABLE][1].append(draft.token == choice)
    return {
        name: proposer_figures(np.array(probability), np.array(agreed, dtype=np.bool_), num_positions)
        for name, (probability, agreed) in samples.items()
        if name in ladder.proposer_names
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
        figure = proposer_figures(probability.double().numpy(), agreed, len(agreed))
        if label == "cosine":
            by_token = exit_samples(depth, head, chunks, vocabulary, layers, "agreement")
            figure["agreement"] = float(by_token.label.float().mean())
        figures[layer_exit.name] = figure
    return figures


# Chains at a time.
CHAINS_PER_PASS = 1024


def chain_agreement(
    helped: Tensor,
    heads: Mapping[int, ExitHead],
    chunks: Sequence[StateChunk],
    vocabulary: DraftVocabulary,
    num_layers: int,
) -> dict[int, dict[str, float]]:
    """By depth: "agreement_1" .. "agreement_4", the share of chains whose first .. fourth draft is the full model's
    choice, and "agreement_1_beside_tables" .., the same where the tables' draft is wrong or missing. "positions" and
    "positions_beside_tables": the numbers of chains.

    Every position begins a chain of the sequence's own tokens. `helped`: by `tables_are_right`, of the sequences of the
    chunks, in the same order, or of the first of them. Choices outside the draft vocabulary count as missed.
    """
    figures: dict[int, dict[str, float]] = {}
    for depth, head in heads.items():
        # [2, NUM_PLACES]: of all chains, and of those that the tables do not help.
        right, counts = torch.zeros(2, NUM_PLACES), torch.zeros(2, NUM_PLACES)
        start = 0
        for stored in chunks:
            chunk = stored.to(vocabulary.device)
            labelled = helped[start : start + len(chunk.usable)]
            beside = ~labelled[chunk.usable[: len(labelled)]]
            start += len(chunk.usable)
            for index in torch.arange(len(beside)).split(CHAINS_PER_PASS):
                outputs = chain_outputs(depth, head, chunk, index, vocabulary, num_layers)
                for place, output in enumerate(outputs):
                    positions = output.positions.cpu()
                    agrees = (output.logits.argmax(-1) == output.choices).cpu()
                    known = positions < len(beside)
                    is_beside = beside[positions[known]]
                    counted = torch.stack([torch.ones_like(is_beside), is_beside])
                    right[:, place] += (counted & agrees[known]).sum(1)
                    counts[:, place] += counted.sum(1)
        overall, beside_tables = (right / counts.clamp(min=1)).tolist()
        exit_figures = figures[depth] = {
            "positions": int(counts[0, 0]),
            "positions_beside_tables": int(counts[1, 0]),
        }
        for place in range(NUM_PLACES):
            exit_figures[f"agreement_{place + 1}"] = overall[place]
            exit_figures[f"agreement_{place + 1}_beside_tables"] = beside_tables[place]
    return figures


def tables_are_right(ladder: Ladder, sequences: Iterable[LabelledSequence]) -> Tensor:
    """Whether the tables' draft is the full model's choice, for the sequences' labelled positions [N] bool."""
    is_right = []
    for sequence in sequences:
        for drafts, choice in table_positions(ladder, sequence):
            best = max(drafts, key=lambda draft: draft.probability, default=None)
            is_right.append(best is not None and best.token == choice)
    return torch.tensor(is_right, dtype=torch.bool)


# Probability from which on a draft counts as confident.
CONFIDENT = 0.5
# Equal bins of probability in a reliability diagram.
NUM_BINS = 10

Floats = npt.NDArray[np.float64]


def proposer_figures(probability: Floats, agreed: npt.NDArray[np.bool_], num_positions: int) -> dict[str, object]:
    """All metrics of one proposer. `probability` [N] and `agreed` [N]: its drafts, at N of `num_positions`
    positions."""
    return {
        "positions": num_positions,
        "agreement": float(agreed.sum()) / max(num_positions, 1),
        "coverage": len(agreed) / max(num_positions, 1),
        "agreement_when_proposed": float(agreed.mean()) if len(agreed) else 0.0,
        **confidence_figures(probability, agreed),
        "reliability": reliability(probability, agreed),
    }


def confidence_figures(probability: Floats, agreed: npt.NDArray[np.bool_]) -> dict[str, float]:
    """AUC, Brier score, precision at CONFIDENT and expected calibration error of N probabilities [N] and outcomes [N];
    0 if N is 0."""
    if len(agreed) == 0:
        return {"confidence_auc": 0.0, "confidence_brier": 0.0, "confidence_precision": 0.0, "confidence_ece": 0.0}
    confident = agreed[probability >= CONFIDENT]
    return {
        "confidence_auc": auc(probability, agreed),
        "confidence_brier": float(np.mean((probability - agreed) ** 2)),
        "confidence_precision": float(confident.mean()) if len(confident) else 0.0,
        "confidence_ece": calibration_error(probability, agreed),
    }


def wilson_interval(count: int, num_trials: int, z: float) -> tuple[float, float]:
    """Wilson's interval of the share of independent trials of which `count` came out so; `z`: the quantile of the
    normal distribution. (0, 1) without trials."""
    if num_trials == 0:
        return 0.0, 1.0
    share, square = count / num_trials, z**2 / num_trials
    middle = share + square / 2
    spread = math.sqrt(square * (share * (1 - share) + square / 4))
    # Rounding may leave something of a bound that is 0 or 1.
    return max((middle - spread) / (1 + square), 0.0), min((middle + spread) / (1 + square), 1.0)


def auc(probability: Floats, agreed: npt.NDArray[np.bool_]) -> float:
    """Area under the ROC curve: the chance that a right draft has a higher probability than a wrong one, ties counted
    half.

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
    """Expected calibration error: mean difference of probability and share of agreement over the bins, weighted by
    their size."""
    bins = reliability(probability, agreed)
    errors = (row["count"] * abs(row["probability"] - row["agreement"]) for row in bins)
    return sum(errors) / max(len(agreed), 1)


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


# Tables that say less of their best draft are unsure.
SURE = 0.5
SITUATIONS = ("tables_unsure", "agree", "differ")


def joint_figures(weights: JointWeights, positions: Iterable[Position]) -> dict[str, dict[str, float]]:
    """Figures of the draft that is chosen, by situation: where the tables are unsure or silent, where tables and exits
    propose the same best token, and where they propose different ones.

    "positions"; "agreement", the share of drafts that are right; the Brier scores of the joint probability, "brier",
    and of what the draft's own proposer says, "brier_alone". Only "positions" where there are none.
    """
    positions = list(positions)
    exit_names = sorted({draft.proposer for drafts, _ in positions for draft in drafts if draft.is_exit})
    confidence = Confidence(weights, exit_names)
    by_situation: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SITUATIONS}
    for drafts, choice in positions:
        if not drafts:
            continue
        draft, _, _, probability = confidence.rate(drafts)[0]
        right = float(draft.token == choice)
        errors = right, (probability - right) ** 2, (draft.probability - right) ** 2
        table, best_exit = (
            max(
                (candidate for candidate in drafts if candidate.is_exit == of_exit),
                key=lambda candidate: candidate.probability,
                default=None,
            )
            for of_exit in (False, True)
        )
        if table is None or table.probability < SURE:
            by_situation["tables_unsure"].append(errors)
        if table is not None and best_exit is not None:
            by_situation["agree" if table.token == best_exit.token else "differ"].append(errors)
    figures: dict[str, dict[str, float]] = {}
    for name, rows in by_situation.items():
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        keys = ("agreement", "brier", "brier_alone")
        figures[name] = {"positions": len(rows), **dict(zip(keys, means, strict=False))}
    return figures
