"""A chain of drafts while it grows, draft by draft."""

from collections.abc import Sequence as Rows

from torch import Tensor

from inference_service.engine.drafting.chain import Chain
from inference_service.engine.drafting.planner import (
    MIN_SURVIVAL,
    ExitGains,
    PassCosts,
    exit_gain_s,
    least_survival,
    worth_asking,
)
from inference_service.engine.request.sequence import Sequence
from shared.errors import Corrupt
from shared.ladder.rungs import Draft

# Belief in what a deep pass yields of a sequence that has had none, and its weight in passes.
USUAL_TOKENS_PER_PASS, PASS_WEIGHT = 1.5, 8


class DraftBuilder:
    """A sequence's last final token and what is drafted after it, draft by draft; how many of them to settle is the planner's choice.

    `best` is the most probable next token so far, `known` its probability as trusted for this request; `survival` is how
    likely all drafts of the chain are right.
    """

    def __init__(
        self, sequence: Sequence, costs: PassCosts, num_sequences: int, *, drafts: bool
    ) -> None:
        policy = sequence.request.policy
        self.sequence = sequence
        self.chain = Chain(len(sequence.tokens) - 1, [sequence.tokens[-1]], sequence.cache)
        self.min_layers = policy.min_layers
        self.survival = 1.0
        self.best: Draft | None = None
        self.known = 0.0
        # One token of the answer comes from the deep pass itself.
        self._room = min(sequence.num_left - 1, costs.max_drafts)
        if policy.max_drafts:
            self._room = min(self._room, policy.max_drafts)
        if (
            policy.name == "full"
            or sequence.ladder is None
            or (not drafts and sequence.may_skip_drafting)
        ):
            self._room = 0
        # A fixed number is what the caller asked for, worth it or not.
        self._least = MIN_SURVIVAL
        if self._room > 0 and not policy.max_drafts:
            self._least = least_survival(costs, num_sequences)

    @property
    def wants_more(self) -> bool:
        return len(self.chain.drafts) < self._room and self.survival >= self._least

    @property
    def tokens_per_pass(self) -> float:
        """What a deep pass has yielded of this sequence, starting from a belief."""
        passes = self.sequence.num_deep_passes
        tokens = PASS_WEIGHT * USUAL_TOKENS_PER_PASS + passes + self.sequence.num_accepted
        return tokens / (PASS_WEIGHT + passes)

    @property
    def deep_state(self) -> Tensor:
        state = self.sequence.deep_state
        assert state is not None
        return state

    def gain_s(
        self, index: int, known: float, num_sequences: int, costs: PassCosts, gains: ExitGains
    ) -> float:
        """What asking exit `index` for the next draft is expected to save, if its token is `known` so well: see `exit_gain_s`."""
        gain = gains.expected(index, known)
        return exit_gain_s(self.survival, gain, costs, num_sequences, self.tokens_per_pass)

    def look_up(self) -> None:
        """What rung 0 says comes next; no layer runs."""
        self.best, self.known = None, 0.0
        assert self.sequence.drafter is not None
        if self.min_layers == 0:
            draft = self.sequence.drafter.table_draft([draft.token for draft in self.chain.drafts])
            if draft is not None:
                self.consider(draft)

    def consider(self, draft: Draft) -> float:
        """Takes the draft if it is more probable than the best so far; its probability as trusted for this request.

        Raises `Corrupt` (reason DRAFT_OUT_OF_RANGE) for no token of the model: a pass over it would fail for all that share it.
        """
        if not 0 <= draft.token < self.sequence.vocabulary_size:
            raise Corrupt(
                f"rung {draft.rung} of the router drafted token {draft.token}; the model has {self.sequence.vocabulary_size}",
                reason="DRAFT_OUT_OF_RANGE",
            )
        probability = self.sequence.reliability.adjusted(draft)
        if probability > self.known:
            self.best, self.known = draft, probability
        return probability

    def extend(self) -> bool:
        """Appends the best draft; False if there is none."""
        draft, policy, chain = self.best, self.sequence.request.policy, self.chain
        if draft is None:
            return False
        probability = self.known
        all_final = chain.num_final == len(chain.drafts)
        if policy.name == "relaxed" and all_final and draft.probability >= policy.threshold:
            chain.num_final += 1
            probability = 1.0
        chain.append(draft, probability)
        self.survival *= probability
        return True


def worth_taking(
    growing: Rows[DraftBuilder],
    index: int,
    depth: int,
    num_sequences: int,
    costs: PassCosts,
    gains: ExitGains,
) -> list[DraftBuilder]:
    """The chains whose last tokens are worth taking to exit `index` at `depth`, together."""
    able = [one for one in growing if depth >= one.min_layers]
    gains_s = [one.gain_s(index, one.known, num_sequences, costs, gains) for one in able]
    return [able[place] for place in worth_asking(gains_s, costs.exits[index])]
