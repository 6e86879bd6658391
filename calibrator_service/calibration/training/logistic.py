"""Logistic regression on a few features, with a prior."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS, LEAST_STEP = 50, 1e-6


@torch.no_grad()
def fit_logistic(features: Tensor, target: Tensor, prior: Sequence[float], precision: Sequence[float]) -> list[float]:
    """The weights of `features` [N, K] that minimise the log loss of `target` [N] plus precision * (weight - prior)^2 /
    2, by Newton's method.

    The precision of each weight must be above 0: it bounds the influence of a handful of samples. Without samples the
    weights are the prior's.
    """
    rows, target = features.double(), target.double()
    middle, ridge = (torch.tensor(values, dtype=torch.float64) for values in (prior, precision))

    def loss(weights: Tensor) -> float:
        score = rows @ weights
        distance = weights - middle
        return float((F.softplus(score) - target * score).sum() + (ridge * distance**2).sum() / 2)

    weights = middle.clone()
    for _ in range(STEPS):
        p = torch.sigmoid(rows @ weights)
        gradient = rows.T @ (p - target) + ridge * (weights - middle)
        hessian = (rows * (p * (1 - p))[:, None]).T @ rows + ridge.diag()
        step = torch.linalg.solve(hessian, gradient)
        # Where the loss is nearly straight, a whole step goes too far and would be taken back by the next one.
        while float(step.abs().max()) > LEAST_STEP and loss(weights - step) > loss(weights):
            step = step / 2
        weights = weights - step
        if float(step.abs().max()) < LEAST_STEP:
            break
    fitted: list[float] = weights.tolist()
    return fitted
