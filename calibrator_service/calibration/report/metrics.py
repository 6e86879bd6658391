"""Metrics of a rung: how often its draft is right, and how well its probability predicts that."""

import math

import numpy as np
import numpy.typing as npt

# Probability from which on a draft counts as confident.
CONFIDENT = 0.5
# Equal bins of probability in a reliability diagram.
NUM_BINS = 10

Floats = npt.NDArray[np.float64]


def rung_figures(probability: Floats, agreed: npt.NDArray[np.bool_], num_positions: int) -> dict[str, object]:
    """All metrics of one rung. `probability` [N] and `agreed` [N]: its drafts, at N of `num_positions` positions."""
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
        return {"router_auc": 0.0, "router_brier": 0.0, "router_precision": 0.0, "router_ece": 0.0}
    confident = agreed[probability >= CONFIDENT]
    return {
        "router_auc": auc(probability, agreed),
        "router_brier": float(np.mean((probability - agreed) ** 2)),
        "router_precision": float(confident.mean()) if len(confident) else 0.0,
        "router_ece": calibration_error(probability, agreed),
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
