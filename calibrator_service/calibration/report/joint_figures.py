"""How well probabilities that follow from what all proposers say predict which drafts are right."""

from collections.abc import Iterable

from calibrator_service.calibration.training.joint import Position
from shared.engine.drafting.confidence import Confidence
from shared.ladder.joint_weights import JointWeights
from shared.ladder.rungs import EXIT

# Tables that say less of their best draft are unsure.
SURE = 0.5
SITUATIONS = ("tables_unsure", "agree", "differ")


def joint_figures(weights: JointWeights, positions: Iterable[Position]) -> dict[str, dict[str, float]]:
    """Figures of the draft that is chosen, by situation: where the tables are unsure or silent, where tables and exits
    propose the same best token, and where they propose different ones.

    "positions"; "agreement", the share of drafts that are right; the Brier scores of the joint probability, "brier",
    and of what the draft's own proposer says, "brier_alone". Only "positions" where there are none.
    """
    confidence = Confidence(weights=weights)
    by_situation: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SITUATIONS}
    for drafts, choice in positions:
        if not drafts:
            continue
        draft, probability = confidence.rate(drafts)[0]
        right = float(draft.token == choice)
        errors = right, (probability - right) ** 2, (draft.probability - right) ** 2
        table, best_exit = (
            max(
                (candidate for candidate in drafts if candidate.rung.startswith(EXIT) == of_exit),
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
