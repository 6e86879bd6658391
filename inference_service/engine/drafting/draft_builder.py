"""Builds one sequence's chain of drafts, one draft at a time."""

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

# Tokens per deep pass that are assumed for a sequence without deep passes, and the weight of this assumption in passes.
USUAL_TOKENS_PER_PASS, PASS_WEIGHT = 1.5, 8


class DraftBuilder:
    """Builds a chain: a sequence's last final token and the drafts after it. The planner later chooses how many of them to verify.

    `best` is the most probable draft so far for the next position. `best_probability` is its probability, adjusted by what this
    request's drafts have shown (see `Reliability`). `survival` is the probability that all drafts of the chain are right.
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
        self.best_probability = 0.0
        # The deep pass itself gives one token of the answer.
        self._room = min(sequence.num_left - 1, costs.max_drafts)
        if policy.max_drafts:
            self._room = min(self._room, policy.max_drafts)
        if (
            policy.name == "full"
            or sequence.ladder is None
            or (not drafts and sequence.may_skip_drafting)
        ):
            self._room = 0
        # If the caller asked for a fixed number of drafts, they are made whether they pay or not.
        self._least_survival = MIN_SURVIVAL
        if self._room > 0 and not policy.max_drafts:
            self._least_survival = least_survival(costs, num_sequences)

    @property
    def wants_more(self) -> bool:
        """Whether another draft may be worth its place in the deep pass."""
        return len(self.chain.drafts) < self._room and self.survival >= self._least_survival

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens that a deep pass has given for this sequence, starting from USUAL_TOKENS_PER_PASS."""
        passes = self.sequence.num_deep_passes
        tokens = PASS_WEIGHT * USUAL_TOKENS_PER_PASS + passes + self.sequence.num_accepted
        return tokens / (PASS_WEIGHT + passes)

    @property
    def deep_state(self) -> Tensor:
        """State at depth L [D] of the last token that has been through every layer."""
        state = self.sequence.deep_state
        assert state is not None
        return state

    def gain_s(self, index: int, num_sequences: int, costs: PassCosts, gains: ExitGains) -> float:
        """Seconds that asking exit `index` for the next draft is expected to save: see `exit_gain_s`."""
        gain = gains.expected(index, self.best_probability)
        return exit_gain_s(self.survival, gain, costs, num_sequences, self.tokens_per_pass)

    def look_up(self) -> None:
        """Begins the next position with the draft of the tables (suffix or successor), if they have one. Runs no layer."""
        self.best, self.best_probability = None, 0.0
        assert self.sequence.drafter is not None
        if self.min_layers == 0:
            draft = self.sequence.drafter.table_draft([draft.token for draft in self.chain.drafts])
            if draft is not None:
                self.consider(draft)

    def consider(self, draft: Draft) -> float:
        """Makes the draft the best one if it is more probable than the best so far. Returns its adjusted probability.

        Raises `Corrupt` (reason DRAFT_OUT_OF_RANGE) if the draft is not a token of the model. A pass over such a token would fail for
        all sequences that share it.
        """
        if not 0 <= draft.token < self.sequence.vocabulary_size:
            raise Corrupt(
                f"rung {draft.rung} of the router drafted token {draft.token}; the model has {self.sequence.vocabulary_size}",
                reason="DRAFT_OUT_OF_RANGE",
            )
        probability = self.sequence.reliability.adjusted(draft)
        if probability > self.best_probability:
            self.best, self.best_probability = draft, probability
        return probability

    def extend(self) -> bool:
        """Appends the best draft to the chain. Returns False if there is none."""
        draft, policy, chain = self.best, self.sequence.request.policy, self.chain
        if draft is None:
            return False
        probability = self.best_probability
        all_final = chain.num_final == len(chain.drafts)
        if policy.name == "relaxed" and all_final and draft.probability >= policy.threshold:
            chain.num_final += 1
            probability = 1.0
        chain.append(draft, probability)
        self.survival *= probability
        return True


def worth_taking(
    builders: Rows[DraftBuilder],
    index: int,
    depth: int,
    num_sequences: int,
    costs: PassCosts,
    gains: ExitGains,
) -> list[DraftBuilder]:
    """The chains whose last tokens are worth taking to exit `index` at `depth` in one pass."""
    allowed = [builder for builder in builders if depth >= builder.min_layers]
    gains_s = [builder.gain_s(index, num_sequences, costs, gains) for builder in allowed]
    return [allowed[place] for place in worth_asking(gains_s, costs.exits[index])]
