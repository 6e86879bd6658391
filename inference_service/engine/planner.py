"""How many tokens to draft before a deep pass, and when a layer exit is worth its time.

A deep pass over 1 + k tokens yields 1 + (expected accepted drafts) tokens. With calibrated probabilities p_1..p_k the i-th draft
survives with p_1 * .. * p_i, and costs are measured on the device, so the engine picks what maximises expected tokens per second;
no draft at all is one of the choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.ladder.rungs import Draft

# Drafts less likely than this to survive are not worth looking up.
MIN_SURVIVAL = 0.02
# Weight, in expected acceptances, of the belief that a rung fares in a request as it does elsewhere, and elsewhere as calibrated.
REQUEST_WEIGHT, SERVED_WEIGHT = 6.0, 24.0
# What was served long ago counts less and less.
SERVED_WINDOW = 1000.0


@dataclass(frozen=True)
class PassCosts:
    """Seconds, measured: `deep[n - 1]` of a pass over n tokens through all layers and the head, `exits[i]` of taking one
    token to the ladder's i-th layer exit and through its head and router."""

    deep: tuple[float, ...]
    exits: tuple[float, ...] = ()

    @property
    def max_drafts(self) -> int:
        return len(self.deep) - 1


class Reliability:
    """How the drafts of each rung fare against their probabilities; scales those to come.

    A router is calibrated over the texts it was shown; what is served may be easier, harder, or sampled at a temperature.
    With `parent`, that is the belief held before anything is recorded here.
    """

    def __init__(self, weight: float, parent: "Reliability | None" = None) -> None:
        self._weight = weight
        self._parent = parent
        self._sums: dict[str, tuple[float, float]] = {}  # rung -> expected, accepted

    def factor(self, rung: str) -> float:
        prior = self._parent.factor(rung) if self._parent else 1.0
        expected, accepted = self._sums.get(rung, (0.0, 0.0))
        return (self._weight * prior + accepted) / (self._weight + expected)

    def adjusted(self, draft: Draft) -> float:
        return min(draft.probability * self.factor(draft.rung), 0.999)

    def record(self, drafts: Sequence[Draft], num_accepted: int) -> None:
        """Of a chain verified in order, drafts after the first rejected one were never tested."""
        for index, draft in enumerate(drafts[: num_accepted + 1]):
            expected, accepted = self._sums.get(draft.rung, (0.0, 0.0))
            expected += draft.probability
            accepted += index < num_accepted
            if expected > SERVED_WINDOW:
                expected, accepted = expected / 2, accepted / 2
            self._sums[draft.rung] = expected, accepted
        if self._parent is not None:
            self._parent.record(drafts, num_accepted)


def best_length(probabilities: Sequence[float], costs: PassCosts) -> int:
    """How many of a chain's drafts to verify: the count with the most expected tokens per second."""
    best, best_rate = 0, 1.0 / costs.deep[0]
    expected, survival = 1.0, 1.0
    for count, probability in enumerate(probabilities[: costs.max_drafts], start=1):
        survival *= probability
        expected += survival
        rate = expected / costs.deep[count]
        if rate > best_rate:
            best, best_rate = count, rate
    return best


class ExitGains:
    """What asking each layer exit has brought, by how sure the best rung before it was.

    An exit agrees less often where the tables are unsure, too, so its overall agreement promises too much. What an exit's
    probability exceeds the known one by, both corrected by `Reliability`, is a sample of its worth. Starts from the held-out
    agreement; lives as long as the ladder is bound.
    """

    NUM_BINS = 5
    PRIOR_WEIGHT = 8.0

    def __init__(self, agreements: Sequence[float]) -> None:
        middles = [(number + 0.5) / self.NUM_BINS for number in range(self.NUM_BINS)]
        self._gains = [
            [self.PRIOR_WEIGHT * max(agreement - middle, 0.0) for middle in middles]
            for agreement in agreements
        ]
        self._counts = [[self.PRIOR_WEIGHT] * self.NUM_BINS for _ in agreements]

    def expected(self, index: int, known: float) -> float:
        """How much more probable the `index`-th exit's token will be than `known`; 0 if it will not be."""
        found = self._bin(known)
        return self._gains[index][found] / self._counts[index][found]

    def record(self, index: int, known: float, probability: float) -> None:
        found = self._bin(known)
        self._gains[index][found] += max(probability - known, 0.0)
        self._counts[index][found] += 1.0

    def _bin(self, known: float) -> int:
        return min(int(known * self.NUM_BINS), self.NUM_BINS - 1)


def exit_pays(survival: float, gain: float, index: int, costs: PassCosts) -> bool:
    """Whether taking the next token to the `index`-th layer exit is expected to gain more time than it takes.

    `gain` is by how much it is expected to raise the draft's probability. A draft accepted in place of none saves about one deep
    pass, less what the pass grows by one token.
    """
    growth = (costs.deep[-1] - costs.deep[0]) / max(costs.max_drafts, 1)
    return survival * gain * (costs.deep[0] - growth) > costs.exits[index]
