"""How probable it is that a draft is right, given what all proposers say of its position.

Tables and exits are calibrated one by one. Where they propose the same token, it is more probable than either says.
Where they differ, both are less: an exit is then right a third to half as often as its confidence head says, because it
differs most where it is wrong.
"""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType

from shared.ladder.joint_weights import (
    AGREE,
    CASES,
    DEFAULT_WEIGHTS,
    EXIT_ALONE,
    EXIT_DIFFERS,
    TABLE_DIFFERS,
    JointWeights,
)
from shared.ladder.proposers import EXIT, Draft

# Tables alone are believed as they are.
TABLE_ALONE = "table"
LEAST, MOST = 0.001, 0.999
# Weight of the priors, in expected right drafts, and the sum at which all are halved, so that older requests weigh
# less.
PRIOR_WEIGHT, WINDOW = 24.0, 1000.0


def log_odds(probability: float) -> float:
    probability = min(max(probability, LEAST), MOST)
    return math.log(probability / (1.0 - probability))


def cases(
    drafts: Sequence[Draft], ratios: Mapping[tuple[str, str], float] = MappingProxyType({})
) -> list[tuple[Draft, str, Draft | None]]:
    """Per token that is proposed for a position: its draft, the case (of `JointWeights`, or TABLE_ALONE), and the other
    proposer's draft. Not of a token that a table alone proposes, if another table is surer of another one.

    `ratios` of (TABLE_ALONE, proposer): how much more often a table was right than it said. So the surest of two may
    not be the better one.
    """
    tables: dict[int, tuple[float, Draft]] = {}
    exits: dict[int, tuple[float, Draft]] = {}
    for draft in drafts:
        if draft.proposer.startswith(EXIT):
            by_token, rated = exits, draft.probability
        else:
            by_token, rated = tables, draft.probability * ratios.get((TABLE_ALONE, draft.proposer), 1.0)
        held = by_token.get(draft.token)
        if held is None or rated > held[0]:
            by_token[draft.token] = rated, draft
    best_table, best_exit = (max(kind.values(), key=itemgetter(0), default=(0.0, None))[1] for kind in (tables, exits))
    in_cases: list[tuple[Draft, str, Draft | None]] = []
    for token, (_, draft) in (exits | tables).items():
        if token in tables and token in exits:
            in_cases.append((draft, AGREE, exits[token][1]))
        elif draft is best_table:
            in_cases.append((draft, TABLE_DIFFERS if exits else TABLE_ALONE, best_exit))
        elif token in exits:
            in_cases.append((draft, EXIT_DIFFERS if tables else EXIT_ALONE, best_table))
    return in_cases


class Confidence:
    """For one ladder and one kind of request. It learns from what was verified: from every draft of a position, chosen
    or not. `weights`: the ladder's.
    """

    def __init__(self, weights: JointWeights = DEFAULT_WEIGHTS) -> None:
        self._weights = {case: weights.of(case) for case in CASES}
        # (case, proposer) -> expected, right; and by what a probability has to be scaled for it.
        self._sums: dict[tuple[str, str], tuple[float, float]] = {}
        self._ratios: dict[tuple[str, str], float] = {}

    def rate(self, drafts: Sequence[Draft]) -> list[tuple[Draft, float]]:
        """The drafts of a position that count (see `cases`), and the probability that each is right. The best first."""
        rated = [
            (draft, min(probability * self._ratios.get((case, draft.proposer), 1.0), MOST))
            for draft, case, probability in self._combined(drafts)
        ]
        return sorted(rated, key=itemgetter(1), reverse=True)

    def factor(self, proposer: str) -> float:
        """By what the probabilities of an exit's confidence head have to be scaled, whatever the tables say."""
        return self._ratios.get(("", proposer), 1.0)

    def expected_gain(self, proposer: str, agreement: float, before: float) -> float:
        """By how much the draft of an exit is expected to be more probable than the best one so far, of probability
        `before`. `agreement`: how often its drafts are right, measured at calibration.

        Where tables say nothing, this is more than 0 however seldom the exit was right lately.
        So it is asked there, and can come back.
        """
        return agreement * self.factor(proposer) - before

    def record(self, proposals: Sequence[Sequence[Draft]], tokens: Sequence[int]) -> None:
        """Records what a pass has shown: that `tokens` were the full model's choices at successive places, for which
        these drafts were proposed. The rest of the longer one does not count."""
        for drafts, token in zip(proposals, tokens, strict=False):
            for draft, case, probability in self._combined(drafts):
                self._add(case, draft.proposer, probability, draft.token == token)
            for draft in drafts:
                if draft.proposer.startswith(EXIT):
                    self._add("", draft.proposer, draft.probability, draft.token == token)

    def _add(self, case: str, proposer: str, probability: float, is_right: bool) -> None:
        expected, right = self._sums.get((case, proposer), (0.0, 0.0))
        expected, right = expected + probability, right + is_right
        scale = 0.5 if expected > WINDOW else 1.0
        expected, right = self._sums[case, proposer] = scale * expected, scale * right
        self._ratios[case, proposer] = (PRIOR_WEIGHT + right) / (PRIOR_WEIGHT + expected)

    def _combined(self, drafts: Sequence[Draft]) -> list[tuple[Draft, str, float]]:
        """Per token: its draft, the case, and the probability, not yet corrected by what was served."""
        combined: list[tuple[Draft, str, float]] = []
        for draft, case, opposed in cases(drafts, self._ratios):
            probability = draft.probability
            if case != TABLE_ALONE:
                constant, weight, opposed_weight = self._weights[case]
                odds = constant + weight * log_odds(probability)
                if opposed is not None:
                    odds += opposed_weight * log_odds(opposed.probability)
                probability = 1.0 / (1.0 + math.exp(-odds))
            combined.append((draft, case, probability))
        return combined
