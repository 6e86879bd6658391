"""The costs that drafting is planned by: csrc/draft/planner.h."""

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


def call_gain_s(costs: PassCosts, cost: ExitCost, agreement: float) -> float:
    """Seconds that a call of an exit is expected to save one sequence whose tables say nothing, if the exit is right
    with the probability `agreement`. The price of the call is not subtracted."""
    numbers = 0, agreement, cost.alone_s, cost.each_more_s, cost.each_draft_s, cost.num_drafts
    ladder = native_ladder(None, 1, costs.verify, costs.wide, [numbers])
    gain_s: float = functions().neap_ladder_call_gain_s(ladder.address, 0, agreement)
    return gain_s
