"""Asking a ladder's exits by walks: how deep each token may go, how sure an exit must be to keep it, and what came of it.

See `shared.ladder.walk`. Whether to go on is settled before the walk, for the device decides by thresholds: at each exit the least
probability from which on no deeper exit is expected to bring more than it costs.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows

from inference_service.engine.chain import bring_to
from inference_service.engine.growing import GrowingChain, worth_taking
from inference_service.engine.planner import ExitGains, PassCosts
from shared.ladder.ladder import BoundLadder
from shared.ladder.walk import Walked, Walker
from shared.model.paged_kv import PagedCache
from shared.model.runner import DepthRunner


def ask_by_walk(
    walk: Callable[[Rows[Walker]], list[Walked]],
    ladder: BoundLadder,
    growing: Rows[GrowingChain],
    num_sequences: int,
    runner: DepthRunner,
    costs: PassCosts,
    gains: ExitGains,
) -> None:
    """Takes the chains' last tokens to the exits that are worth it, all in one walk."""
    deepest = _deepest_exits(ladder, growing, num_sequences, costs, gains)
    if not deepest:
        return
    for last in sorted(set(deepest.values())):
        # Keys and values of the tokens before: a walk takes one token of each chain.
        able = [one.chain for one, index in deepest.items() if index >= last]
        if ladder.depths[last]:
            bring_to(ladder.depths[last], able, runner, but_last=True)
    plan = _Plan(ladder, num_sequences, len(deepest), costs, gains)
    walkers = [plan.walker(one, last) for one, last in deepest.items()]
    for one, walked in zip(deepest, walk(walkers), strict=True):
        _take(one, walked, gains)


def _deepest_exits(
    ladder: BoundLadder,
    growing: Rows[GrowingChain],
    num_sequences: int,
    costs: PassCosts,
    gains: ExitGains,
) -> dict[GrowingChain, int]:
    """By chain, where it is worth asking any: the deepest exit that is."""
    deepest: dict[GrowingChain, int] = {}
    for index, depth in enumerate(ladder.depths):
        asked = worth_taking(growing, index, depth, num_sequences, costs, gains)
        deepest |= dict.fromkeys(asked, index)
    return deepest


class _Plan:
    """One walk's thresholds. `num_walkers` share what an exit costs."""

    def __init__(
        self,
        ladder: BoundLadder,
        num_sequences: int,
        num_walkers: int,
        costs: PassCosts,
        gains: ExitGains,
    ) -> None:
        self._ladder = ladder
        self._num_sequences = num_sequences
        self._costs, self._gains = costs, gains
        self._costs_s = [cost.of(num_walkers) / num_walkers for cost in costs.exits]

    def walker(self, one: GrowingChain, last: int) -> Walker:
        """The chain's last token, on its way to the `last` exit at most."""
        cache = one.chain.cache
        assert isinstance(cache, PagedCache)
        thresholds = [self._threshold(one, index, last) for index in range(last)]
        # Nobody walks past the exit that is the last for it.
        thresholds += [0.0] * (len(self._ladder.depths) - last)
        return Walker(
            token=one.chain.tokens[-1],
            cache=cache,
            position=one.chain.base + len(one.chain.drafts),
            deep_state=one.deep_state,
            offset=len(one.chain.tokens),
            thresholds=tuple(thresholds),
        )

    def _threshold(self, one: GrowingChain, index: int, last: int) -> float:
        """How sure exit `index` must be of its token for the chain to go no further."""
        depths = self._ladder.depths
        if depths[index] < one.min_layers:
            return math.inf

        def goes_on(known: float) -> bool:
            return any(
                one.gain_s(deeper, known, self._num_sequences, self._costs, self._gains)
                > self._costs_s[deeper]
                for deeper in range(index + 1, last + 1)
            )

        least = self._gains.least_known(goes_on)
        if one.known >= least:
            return 0.0
        # The device compares what the router says, not how far that is trusted here.
        factor = one.sequence.reliability.factor(self._ladder.rung_of(index))
        return least / factor


def _take(one: GrowingChain, walked: Walked, gains: ExitGains) -> None:
    for index, draft in enumerate(walked.drafts):
        if draft.depth >= one.min_layers:
            known = one.known
            gains.record(index, known, one.consider(draft))
    chain, depth = one.chain, walked.depth
    if depth:
        chain.reached[-1], chain.states[-1] = depth, walked.state
        chain.num_layer_executions += depth
        chain.num_token_layers += depth
