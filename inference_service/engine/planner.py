"""How many tokens to draft before a deep pass, and when a layer exit is worth its time.

A deep pass over 1 + k tokens yields 1 + (expected accepted drafts) tokens. With calibrated probabilities p_1..p_k the i-th draft
survives with p_1 * .. * p_i, and costs are measured on the device, so the engine picks what maximises expected tokens per second;
no draft at all is one of the choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Drafts less likely than this to survive are not worth looking up.
MIN_SURVIVAL = 0.02
# Weight, in drafts, of the belief that the routers' probabilities are right for this request.
TRUST_WEIGHT = 6.0


@dataclass(frozen=True)
class PassCosts:
    """Seconds, measured: `deep[n - 1]` of a pass over n tokens through all layers and the head, `exits[i]` of taking one
    token to the ladder's i-th layer exit and through its head and router."""

    deep: tuple[float, ...]
    exits: tuple[float, ...] = ()

    @property
    def max_drafts(self) -> int:
        return len(self.deep) - 1


@dataclass
class Trust:
    """How this request's drafts fare against their probabilities; scales those to come.

    A router is calibrated over many texts; one request may be easier, harder, or sampled at a temperature.
    """

    expected: float = TRUST_WEIGHT
    accepted: float = TRUST_WEIGHT

    @property
    def factor(self) -> float:
        return self.accepted / self.expected

    def record(self, probabilities: Sequence[float], num_accepted: int) -> None:
        """Of a chain verified in order, drafts after the first rejected one were never tested."""
        tested = probabilities[: num_accepted + 1]
        self.expected += sum(tested)
        self.accepted += num_accepted

    def adjusted(self, probability: float) -> float:
        return min(probability * self.factor, 0.999)


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

    An exit agrees less often where the tables are unsure, too, so its overall agreement promises too much. Routers are calibrated,
    so what an exit's probability exceeds the known one by is an unbiased sample of its worth. Starts from the held-out
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
