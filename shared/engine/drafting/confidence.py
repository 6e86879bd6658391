"""How probable it is that a draft is right, given what all proposers say of its position, and what asking an exit is
expected to add.

Tables and exits are calibrated one by one. Where they propose the same token, it is more probable than either says.
Where they differ, both are less: an exit is then right a third to half as often as its confidence head says, because it
differs most where it is wrong.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from shared.ladder.joint_weights import (
    AGREE,
    DEFAULT_WEIGHTS,
    EXIT_ALONE,
    EXIT_DIFFERS,
    TABLE_DIFFERS,
    TABLE_SECOND,
    JointWeights,
)
from shared.ladder.rungs import Draft, is_exit

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
    drafts: Sequence[Draft], rating: Callable[[Draft], float]
) -> Iterator[tuple[Draft, str, Draft | None]]:
    """Per token that is proposed for a position: its draft, the case (of `JointWeights`, or TABLE_ALONE), and the other
    proposer's draft.

    `rating` of a table's draft: of two tables, the one that was right more often than it said may be the better one.
    """
    tables: dict[int, tuple[float, Draft]] = {}
    exits: dict[int, tuple[float, Draft]] = {}
    for draft in drafts:
        if is_exit(draft.rung):
            own, rated = exits, draft.probability
        else:
            own, rated = tables, rating(draft)
        held = own.get(draft.token)
        if held is None or rated > held[0]:
            own[draft.token] = rated, draft
    best_table, best_exit = (
        max(own.values(), key=itemgetter(0), default=(0.0, None))[1] for own in (tables, exits)
    )
    for token, (_, draft) in (exits | tables).items():
        if token in tables and token in exits:
            yield draft, AGREE, exits[token][1]
        elif token in tables and draft is not best_table:
            yield draft, TABLE_SECOND, None
        elif token in tables:
            yield draft, TABLE_DIFFERS if exits else TABLE_ALONE, best_exit
        else:
            yield draft, EXIT_DIFFERS if tables else EXIT_ALONE, best_table


class Confidence:
    """For one ladder and one kind of request. It learns from what was verified: from every draft of a position, chosen
    or not.

    Gains are those of asking an exit, by the probability of the best draft before it was asked: an exit adds less where
    tables are sure. Their priors come from the exits' held-out `agreements`. `weights`: the ladder's.
    """

    NUM_BINS = 5
    GAIN_WEIGHT = 8.0

    def __init__(
        self, agreements: Sequence[float] = (), weights: JointWeights = DEFAULT_WEIGHTS
    ) -> None:
        self._weights = weights
        # (case, rung) -> expected, right.
        self._sums: dict[tuple[str, str], tuple[float, float]] = {}
        middles = [(number + 0.5) / self.NUM_BINS for number in range(self.NUM_BINS)]
        self._gains = [
            [self.GAIN_WEIGHT * max(agreement - middle, 0.0) for middle in middles]
            for agreement in agreements
        ]
        self._counts = [[self.GAIN_WEIGHT] * self.NUM_BINS for _ in agreements]

    def rate(self, drafts: Sequence[Draft]) -> list[tuple[Draft, float]]:
        """One draft per token that is proposed for a position, and the probability that it is right. The best first."""
        rated = [
            (draft, min(probability * self._ratio(case, draft.rung), MOST))
            for draft, case, probability in self._combined(drafts)
        ]
        return sorted(rated, key=itemgetter(1), reverse=True)

    def factor(self, rung: str) -> float:
        """By what the probabilities of an exit's confidence head have to be scaled, whatever the tables say."""
        return self._ratio("", rung)

    def record(self, drafts: Sequence[Draft], token: int) -> None:
        """Records that `token` was the full model's choice where these drafts were proposed."""
        for draft, case, probability in self._combined(drafts):
            self._add(case, draft.rung, probability, draft.token == token)
        for draft in drafts:
            if is_exit(draft.rung):
                self._add("", draft.rung, draft.probability, draft.token == token)

    def expected_gain(self, index: int, before: float) -> float:
        """By what asking the `index`-th exit raises the probability of the best draft, if it was `before`."""
        found = self._bin(before)
        return self._gains[index][found] / self._counts[index][found]

    def record_gain(self, index: int, before: float, gain: float) -> None:
        """Records that the `index`-th exit was asked, and raised the probability by `gain`."""
        found = self._bin(before)
        self._gains[index][found] += gain
        self._counts[index][found] += 1.0

    def _ratio(self, case: str, rung: str) -> float:
        expected, right = self._sums.get((case, rung), (0.0, 0.0))
        return (PRIOR_WEIGHT + right) / (PRIOR_WEIGHT + expected)

    def _add(self, case: str, rung: str, probability: float, is_right: bool) -> None:
        expected, right = self._sums.get((case, rung), (0.0, 0.0))
        expected, right = expected + probability, right + is_right
        scale = 0.5 if expected > WINDOW else 1.0
        self._sums[case, rung] = scale * expected, scale * right

    def _bin(self, probability: float) -> int:
        return min(int(probability * self.NUM_BINS), self.NUM_BINS - 1)

    def _combined(self, drafts: Sequence[Draft]) -> Iterator[tuple[Draft, str, float]]:
        """Per token: its draft, the case, and the probability, not yet corrected by what was served."""
        for draft, case, other in cases(drafts, self._table_rating):
            if case == TABLE_ALONE:
                yield draft, case, draft.probability
                continue
            constant, own_weight, other_weight = self._weights.of(case)
            odds = constant + own_weight * log_odds(draft.probability)
            if other is not None:
                odds += other_weight * log_odds(other.probability)
            yield draft, case, 1.0 / (1.0 + math.exp(-odds))

    def _table_rating(self, draft: Draft) -> float:
        return draft.probability * self._ratio(TABLE_ALONE, draft.rung)
