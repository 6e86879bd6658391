"""How many tokens each sequence drafts before a verify pass, and when a layer exit is worth its time.

A verify pass over the last tokens of B sequences and k drafts yields B + (expected accepted drafts) tokens. With
calibrated probabilities p_1, p_2, .. the i-th draft of a sequence survives with probability p_1 * .. * p_i. Costs are
measured on the device. The planner picks the numbers of drafts with the most expected tokens per second; zero drafts is
one of the choices. The more sequences share a pass, the more probable a draft must be to pay, and a full batch decodes
without drafts.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

# Drafts with a lower probability of survival are not looked up.
MIN_SURVIVAL = 0.02


@dataclass(frozen=True)
class ExitCost:
    """Measured seconds of a call of a layer exit, which drafts on one or several chains: `alone_s` for the first draft
    of one chain, `each_more_s` for that of each further chain, `each_draft_s` for each further draft of a chain. A call
    makes at most `num_drafts` drafts of a chain. Where it makes as many whatever is asked of it, further ones cost
    nothing."""

    alone_s: float
    each_more_s: float
    each_draft_s: float = 0.0
    num_drafts: int = 1

    def of(self, num_tokens: int) -> float:
        return self.alone_s + (num_tokens - 1) * self.each_more_s


@dataclass(frozen=True)
class PassCosts:
    """Measured costs in seconds.

    `verify[n - 1]` is the duration of a pass over n tokens through all layers and the head. `wide` has (tokens,
    seconds) of passes over more tokens, ascending. `exits` are the costs of the ladder's layer exits.
    """

    verify: tuple[float, ...]
    exits: tuple[ExitCost, ...] = ()
    wide: tuple[tuple[int, float], ...] = ()

    @cached_property
    def max_drafts(self) -> int:
        """The most drafts of one sequence in a pass."""
        return len(self.verify) - 1

    def of_pass(self, num_tokens: int) -> float:
        """Seconds of a pass over `num_tokens` tokens.
        Interpolated linearly between the measured sizes, and extrapolated beyond them."""
        if num_tokens <= len(self.verify):
            return self.verify[num_tokens - 1]
        points = [(1, self.verify[0]), (len(self.verify), self.verify[-1]), *self.wide]
        at = min(bisect_left(points, (num_tokens,)), len(points) - 1)
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        if high == low:
            return high_s
        return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)


def least_survival(costs: PassCosts, num_sequences: int, host_s: float = 0.0) -> float:
    """The least probability of survival with which a draft pays for its place in a pass that `num_sequences` sequences
    share, and for the `host_s` seconds in which the host makes it while the device waits.

    If a pass of c seconds gives E expected tokens, a draft that makes a step d seconds longer must add at least E d / c
    expected tokens, and E is at least one per sequence. Of d, the growth of the pass is the smaller of that of one
    draft and the mean of many, because costs may rise in steps.
    """
    cost = costs.of_pass(num_sequences)
    growth = min((costs.of_pass(num_sequences + count) - cost) / count for count in (1, max(costs.max_drafts, 1)))
    return min(max(num_sequences * (growth + host_s) / cost, MIN_SURVIVAL), 1.0)


def best_lengths(
    chains: Sequence[Sequence[float]],
    costs: PassCosts,
    *,
    least: Sequence[int] = (),
    num_other_tokens: int = 0,
) -> list[int]:
    """How many of each sequence's drafts to verify, so that the pass gives the most expected tokens per second.

    `chains[i]` are the probabilities of sequence i's drafts, each given that the drafts before it are right. The first
    `least[i]` of them are verified in any case. A draft that is reached with probability r gives r expected tokens
    more. `num_other_tokens` further tokens (pieces of prompts) are in the same pass.
    """
    if not chains:
        return []
    expected, num_tokens = float(len(chains)), len(chains) + num_other_tokens
    lengths: list[int] = []
    candidates: list[tuple[float, int]] = []  # (-reach, sequence) of drafts that may be left out
    for index, chain in enumerate(chains):
        forced = least[index] if least else 0
        reaches = [*accumulate(chain[: costs.max_drafts], mul)]
        expected += sum(reaches[:forced])
        num_tokens += forced
        lengths.append(forced)
        candidates += [(-reach, index) for reach in reaches[forced:]]
    # No draft is reached more probably than the one before it.
    # So whoever takes the largest remaining reach never skips one.
    candidates.sort()
    best, best_rate = 0, expected / costs.of_pass(num_tokens)
    for count, (negative, _) in enumerate(candidates, start=1):
        expected -= negative
        rate = expected / costs.of_pass(num_tokens + count)
        if rate > best_rate:
            best, best_rate = count, rate
    for _, index in candidates[:best]:
        lengths[index] += 1
    return lengths


def exit_gain_s(
    survival: float, gain: float, costs: PassCosts, num_sequences: int, tokens_per_pass: float = 1.0
) -> float:
    """Seconds that asking a layer exit for one sequence's next draft is expected to save.
    The cost of asking is not subtracted.

    `gain` is the expected increase of the draft's probability. One more accepted draft saves the time of one token: the
    sequence's share of a verify pass divided by its `tokens_per_pass`, minus the growth of the pass by one token.
    """
    cost = costs.of_pass(num_sequences)
    growth = costs.of_pass(num_sequences + 1) - cost
    return survival * gain * (cost / num_sequences / tokens_per_pass - growth)


def chain_gain_s(gain_s: float, agreement: float, cost: ExitCost, room: int) -> float:
    """Seconds that a call is expected to save for one chain, which has `room` for drafts. The price of the call is not
    subtracted.

    `gain_s`: what the first draft saves. Each further one saves `agreement` of what the one before it does, and is made
    as long as that is more than it costs.
    """
    total_s = gain_s
    for _ in range(min(cost.num_drafts, room) - 1):
        gain_s *= agreement
        if gain_s <= cost.each_draft_s:
            break
        total_s += gain_s - cost.each_draft_s
    return total_s


def select_sequences(gains_s: Sequence[float], cost: ExitCost) -> list[int]:
    """Indices of the sequences to take to a layer exit in one pass: the set whose expected gains exceed the cost by
    most.

    A token costs less in a shared pass than alone, so a sequence may be worth asking only together with others.
    """
    ordered = sorted(range(len(gains_s)), key=lambda index: -gains_s[index])
    best, best_s, sum_s = 0, 0.0, 0.0
    for count, index in enumerate(ordered, start=1):
        sum_s += gains_s[index]
        if sum_s - cost.of(count) > best_s:
            best, best_s = count, sum_s - cost.of(count)
    return sorted(ordered[:best])
