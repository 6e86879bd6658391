"""The drafting half of a step: drafts the next tokens of all sequences of a batch at once."""

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from itertools import groupby

import torch
from torch import Tensor

from inference_service.engine.drafting.chain import Chain, advance_to
from inference_service.engine.drafting.draft_builder import DraftBuilder, worth_taking
from inference_service.engine.drafting.planner import (
    SERVED_WEIGHT,
    ExitGains,
    PassCosts,
    Reliability,
)
from inference_service.engine.failure import attempt, fail_all
from inference_service.engine.request.request import GenerationRequest
from inference_service.engine.request.sequence import Sequence
from shared.ladder.ladder import BoundLadder
from shared.model.runner import Runner


class Drafter:
    """Asks the layer exits of one bound ladder for drafts. `costs` include those of the exits; `gains` learns what asking brings."""

    def __init__(self, runner: Runner, costs: PassCosts, gains: ExitGains) -> None:
        self.costs = costs
        self._runner = runner
        self._gains = gains
        # Sampled tokens agree with drafts less often than greedy ones, so the two kinds of requests are recorded separately.
        self._served = {is_greedy: Reliability(SERVED_WEIGHT) for is_greedy in (True, False)}

    def served(self, request: GenerationRequest) -> Reliability:
        """How reliable the ladder's drafts were in earlier requests of this kind (greedy or sampled)."""
        return self._served[request.sampling.is_greedy]

    def ask_exits(
        self, ladder: BoundLadder, builders: Rows[DraftBuilder], num_sequences: int
    ) -> None:
        """Takes the chains' last tokens to the layer exits that are expected to pay, shallowest first. Each exit's tokens share a
        pass."""
        for index, depth in enumerate(ladder.depths):
            asked = worth_taking(builders, index, depth, num_sequences, self.costs, self._gains)
            if not asked:
                continue
            states = last_states_at(depth, [one.chain for one in asked], self._runner)
            deep_states = torch.stack([one.deep_state for one in asked])
            distances = [len(one.chain.tokens) for one in asked]
            drafts = ladder.ask(index, states, deep_states, distances)
            for one, draft in zip(asked, drafts, strict=True):
                before = one.best_probability
                probability = attempt(one.sequence, one.consider, draft)
                if probability is not None:
                    self._gains.record(index, before, probability)


def draft_chains(
    members: Iterable[tuple[Sequence, Drafter]], num_sequences: int, *, drafts: bool = True
) -> list[Chain]:
    """Each member's chain: its last final token and its drafts. `num_sequences` sequences will share the deep pass.

    Drafts in rounds of one draft per sequence, so that all sequences that ask the same exit share one shallow pass, one launch and
    one read-back. If `drafts` is false, only requests draft for which the engine may not choose (see `may_skip_drafting`). There
    may be several members only if the runner supports ragged batches. A sequence that fails has a `failure` afterwards: alone if the work was its
    own, with all that shared an exit if the exit failed.
    """
    growing = [
        (DraftBuilder(sequence, drafter.costs, num_sequences, drafts=drafts), drafter)
        for sequence, drafter in members
    ]
    going = [(one, drafter) for one, drafter in growing if one.wants_more]
    while going:
        for one, _ in going:
            attempt(one.sequence, one.look_up)
        for drafter, ladder, own in _by_ladder(going):
            try:
                drafter.ask_exits(ladder, own, num_sequences)
            except Exception as error:
                fail_all([one.sequence for one in own], error, "asking exits failed for")
        going = [
            (one, drafter)
            for one, drafter in going
            if one.sequence.failure is None and one.extend() and one.wants_more
        ]
    return [one.chain for one, _ in growing]


def _by_ladder(
    going: Rows[tuple[DraftBuilder, Drafter]],
) -> Iterable[tuple[Drafter, BoundLadder, list[DraftBuilder]]]:
    """Groups the chains by ladder, because several versions of a router may serve at once."""

    def key(member: tuple[DraftBuilder, Drafter]) -> tuple[int, int]:
        return id(member[1]), id(member[0].sequence.ladder)

    able = [(one, drafter) for one, drafter in going if one.sequence.failure is None]
    for _, group in groupby(sorted(able, key=key), key):
        own = list(group)
        one, drafter = own[0]
        assert one.sequence.ladder is not None
        yield drafter, one.sequence.ladder, [one for one, _ in own]


def last_states_at(depth: int, chains: Rows[Chain], runner: Runner) -> Tensor:
    """States at `depth` [N, D] of the chains' last tokens. None of them may have been deeper: exits are asked shallowest first."""
    if depth == 0:
        return runner.embed_tokens(
            [chain.tokens[-1] for chain in chains],
            [chain.base + len(chain.drafts) for chain in chains],
        )
    advance_to(depth, chains, runner)
    states = [chain.states[-1] for chain in chains]
    return torch.stack([state for state in states if state is not None])
