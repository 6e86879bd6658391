"""How many tokens each sequence drafts before a deep pass, and when a layer exit is worth its time.

A deep pass over the last tokens of B sequences and k drafts yields B + (expected accepted drafts) tokens. With calibrated
probabilities p_1, p_2, .. the i-th draft of a sequence survives with p_1 * .. * p_i, and costs are measured on the device, so the
engine picks what maximises expected tokens per second; no draft at all is one of the choices. The more sequences share a pass, the
more a draft must promise, and a full batch decodes plainly.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from shared.ladder.rungs import Draft

# Drafts less likely than this to survive are not worth looking up.
MIN_SURVIVAL = 0.02
# Weight, in expected acceptances, of the belief that a rung fares in a request as it does elsewhere, and elsewhere as calibrated.
REQUEST_WEIGHT, SERVED_WEIGHT = 6.0, 24.0
# What was served long ago counts less and less.
SERVED_WINDOW = 1000.0


@dataclass(frozen=True)
class ExitCost:
    """Seconds, measured, of taking tokens to a layer exit and through its head and router: one alone, and each that comes along."""

    alone_s: float
    each_more_s: float

    def of(self, num_tokens: int) -> float:
        return self.alone_s + (num_tokens - 1) * self.each_more_s


@dataclass(frozen=True)
class PassCosts:
    """Seconds, measured: `deep[n - 1]` of a pass over n tokens through all layers and the head, `wide` of passes over more, as
    (tokens, seconds), ascending; `exits` of the ladder's layer exits."""

    deep: tuple[float, ...]
    exits: tuple[ExitCost, ...] = ()
    wide: tuple[tuple[int, float], ...] = ()

    @property
    def max_drafts(self) -> int:
        """Of one sequence."""
        return len(self.deep) - 1

    def of_pass(self, num_tokens: int) -> float:
        """Seconds of a pass over so many tokens: between and beyond what was measured, a straight line."""
        if num_tokens <= len(self.deep):
            return self.deep[num_tokens - 1]
        points = [(1, self.deep[0]), (len(self.deep), self.deep[-1]), *self.wide]
        at = min(bisect_left(points, (num_tokens,)), len(points) - 1)
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        if high == low:
            return high_s
        return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)


def least_survival(costs: PassCosts, num_sequences: int) -> float:
    """How likely a draft must be to survive, for it to be worth its place in the pass of so many sequences.

    With E tokens expected from a pass of c seconds, a draft that makes it d seconds longer must promise E d / c, and E is at
    least one per sequence. The cheaper of one draft and many sets the bar: a step in the costs may be worth crossing.
    """
    cost = costs.of_pass(num_sequences)
    growth = min(
        (costs.of_pass(num_sequences + count) - cost) / count
        for count in (1, max(costs.max_drafts, 1))
    )
    return min(max(num_sequences * growth / cost, MIN_SURVIVAL), 1.0)


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


def best_lengths(
    chains: Sequence[Sequence[float]],
    costs: PassCosts,
    *,
    least: Sequence[int] = (),
    num_other_tokens: int = 0,
) -> list[int]:
    """How many of each chain's drafts to verify: together the counts with the most expected tokens per second.

    `chains[i]` are the probabilities of sequence i's drafts, each given that those before it are right. `least[i]` of them come
    along in any case; `num_other_tokens` (pieces of prompts) are in the pass, too.
    """
    if not chains:
        return []
    lengths = list(least) or [0] * len(chains)
    expected, num_tokens = float(len(chains)), len(chains) + num_other_tokens
    # Within a chain survival only falls, so taking the likeliest draft of all keeps chains whole.
    candidates: list[tuple[float, int]] = []
    survival = [1.0] * len(chains)
    for index, probabilities in enumerate(chains):
        for probability in probabilities[: lengths[index]]:
            survival[index] *= probability
            expected += survival[index]
        num_tokens += lengths[index]
        if lengths[index] < min(len(probabilities), costs.max_drafts):
            heappush(candidates, (-survival[index] * probabilities[lengths[index]], index))
    best, best_rate = list(lengths), expected / costs.of_pass(num_tokens)
    while candidates:
        negative, index = heappop(candidates)
        expected -= negative
        num_tokens += 1
        lengths[index] += 1
        rate = expected / costs.of_pass(num_tokens)
        if rate > best_rate:
            best, best_rate = list(lengths), rate
        if lengths[index] < min(len(chains[index]), costs.max_drafts):
            heappush(candidates, (negative * chains[index][lengths[index]], index))
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


def exit_gain_s(
    survival: float, gain: float, costs: PassCosts, num_sequences: int, tokens_per_pass: float = 1.0
) -> float:
    """Seconds that asking a layer exit for one sequence's next draft is expected to save, what asking takes left aside.

    `gain` is by how much it is expected to raise the draft's probability. A draft accepted in place of none saves what a token
    takes, which is the sequence's share of a deep pass over the `tokens_per_pass` that it yields anyway, less what the pass grows
    by one token.
    """
    cost = costs.of_pass(num_sequences)
    growth = costs.of_pass(num_sequences + 1) - cost
    return survival * gain * (cost / num_sequences / tokens_per_pass - growth)


def worth_asking(gains_s: Sequence[float], cost: ExitCost) -> list[int]:
    """Which sequences to take to a layer exit together, by what each expects to gain: those whose sum exceeds the cost by most.

    Together a token costs less than alone, so sequences may be worth asking that would not be by themselves.
    """
    ordered = sorted(range(len(gains_s)), key=lambda index: -gains_s[index])
    best, best_s, sum_s = 0, 0.0, 0.0
    for count, index in enumerate(ordered, start=1):
        sum_s += gains_s[index]
        if sum_s - cost.of(count) > best_s:
            best, best_s = count, sum_s - cost.of(count)
    return sorted(ordered[:best])
