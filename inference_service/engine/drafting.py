"""The shallow half of a step: tokens that leave early."""

import torch
from torch import Tensor

from inference_service.engine.chain import Chain, bring_to
from inference_service.engine.planner import (
    MIN_SURVIVAL,
    SERVED_WEIGHT,
    ExitGains,
    PassCosts,
    Reliability,
    exit_pays,
    least_survival,
)
from inference_service.engine.request import GenerationRequest
from inference_service.engine.sequence import Sequence
from shared.ladder.rungs import Draft
from shared.model.runner import DepthRunner


class Drafter:
    """Builds chains for one model with a ladder's rungs."""

    def __init__(self, runner: DepthRunner, costs: PassCosts, gains: ExitGains) -> None:
        self._runner = runner
        self._costs = costs
        self._gains = gains
        # Sampled tokens agree with greedy drafts less often, so they must not spoil what greedy requests teach.
        self._served = {is_greedy: Reliability(SERVED_WEIGHT) for is_greedy in (True, False)}

    def served(self, request: GenerationRequest) -> Reliability:
        """How the ladder's drafts have fared in requests like this one."""
        return self._served[request.sampling.is_greedy]

    def build(self, sequence: Sequence, num_sequences: int = 1, *, drafts: bool = True) -> Chain:
        """The last final token and all drafts worth a thought; how many of them to settle is the planner's choice.

        `num_sequences` will share the deep pass. Without `drafts` only a request drafts that does not leave the choice.
        """
        policy = sequence.request.policy
        chain = Chain(len(sequence.tokens) - 1, [sequence.tokens[-1]], sequence.cache)
        if policy.name == "full" or sequence.ladder is None:
            return chain
        if not drafts and sequence.leaves_drafting_open:
            return chain
        # One token of the answer comes from the deep pass itself.
        room = min(sequence.num_left - 1, self._costs.max_drafts)
        if policy.max_drafts:
            room = min(room, policy.max_drafts)
        survival = 1.0
        # A fixed number is what the caller asked for, worth it or not.
        least = MIN_SURVIVAL if policy.max_drafts else least_survival(self._costs, num_sequences)
        while len(chain.drafts) < room and survival >= least:
            draft = self._next(sequence, chain, survival, num_sequences)
            if draft is None:
                break
            probability = sequence.reliability.adjusted(draft)
            all_final = chain.num_final == len(chain.drafts)
            if policy.name == "relaxed" and all_final and draft.probability >= policy.threshold:
                chain.num_final += 1
                probability = 1.0
            chain.append(draft, probability)
            survival *= probability
        return chain

    def _next(
        self, sequence: Sequence, chain: Chain, survival: float, num_sequences: int
    ) -> Draft | None:
        """The most probable token at the chain's end among the rungs that are worth asking."""
        ladder, drafter, reliability = sequence.ladder, sequence.drafter, sequence.reliability
        assert ladder is not None
        assert drafter is not None
        best: Draft | None = None
        known = 0.0
        if sequence.request.policy.min_layers == 0:
            best = drafter.table_draft([draft.token for draft in chain.drafts])
            known = reliability.adjusted(best) if best else 0.0
        for index, depth in enumerate(ladder.depths):
            if depth < sequence.request.policy.min_layers:
                continue
            gain = self._gains.expected(index, known)
            if exit_pays(survival, gain, index, self._costs, num_sequences):
                candidate = self._exit(sequence, chain, index, depth)
                probability = reliability.adjusted(candidate)
                self._gains.record(index, known, probability)
                if probability > known:
                    best, known = candidate, probability
        return best

    def _exit(self, sequence: Sequence, chain: Chain, index: int, depth: int) -> Draft:
        """The `index`-th layer exit's token after the chain's last one."""
        assert sequence.ladder is not None
        assert sequence.deep_state is not None
        state = self._last_state_at(chain, depth)
        return sequence.ladder.exit(index, state, sequence.deep_state, offset=len(chain.drafts) + 1)

    def _last_state_at(self, chain: Chain, depth: int) -> Tensor:
        """State at `depth` [D] of the chain's last token. Exits are asked shallowest first, so it is never deeper already."""
        if depth == 0:
            ids = torch.tensor([[chain.tokens[-1]]], device=self._runner.loaded.device)
            return self._runner.embed(ids, chain.base + len(chain.drafts))[0, 0]
        bring_to(depth, [chain], self._runner)
        state = chain.states[-1]
        assert state is not None
        return state
