"""The costs that drafting is planned by: csrc/draft/planner.h."""

from bisect import bisect_left
from dataclasses import dataclass

from shared.ladder.tables import native_ladder
from shared.ops.drafting import functions


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


@dataclass(frozen=True)
class PassCosts:
    """Measured costs in seconds.

    `verify[n - 1]` is the duration of a pass over n tokens through all layers and the head. `wide` has (tokens,
    seconds) of passes over more tokens, ascending. `exits` are the costs of the ladder's layer exits.
    """

    verify: tuple[float, ...]
    exits: tuple[ExitCost, ...] = ()
    wide: tuple[tuple[int, float], ...] = ()

    def pass_s(self, num_tokens: float) -> float:
        """Seconds of a pass over so many tokens on average: on the lines between the measured costs, and beyond the
        last of them on the line through it and the first."""
        points = [*enumerate(self.verify, 1), *(point for point in self.wide if point[0] > len(self.verify))]
        at = min(max(bisect_left(points, (num_tokens, 0.0)), 1), len(points) - 1)
        if len(points) == 1:
            return points[0][1] * max(num_tokens, 1.0)
        (least, least_s), (most, most_s) = points[0 if num_tokens > points[-1][0] else at - 1], points[at]
        return least_s + (most_s - least_s) * (max(num_tokens, 1.0) - least) / (most - least)


def call_gain_s(costs: PassCosts, cost: ExitCost, agreement: float) -> float:
    """Seconds that a call of an exit is expected to save one sequence whose tables say nothing, if the exit is right
    with the probability `agreement`. The price of the call is not subtracted."""
    numbers = 0, agreement, cost.alone_s, cost.each_more_s, cost.each_draft_s, cost.num_drafts
    ladder = native_ladder(None, 1, costs.verify, costs.wide, [numbers])
    gain_s: float = functions().neap_ladder_call_gain_s(ladder.address, 0, agreement)
    return gain_s
