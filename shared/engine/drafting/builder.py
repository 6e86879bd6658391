"""A chain of drafts while it is built."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.engine.drafting.planner import MIN_SURVIVAL, least_survival
from shared.engine.drafting.speculation import Speculation
from shared.engine.request.sequence import DecodingSequence
from shared.errors import Corrupt
from shared.ladder.native_chain import HeadDraft
from shared.ladder.proposers import Draft
from shared.ops.chains import ChainStart

# Tokens per verify pass that are assumed for a sequence without any, and the weight of this assumption in passes.
USUAL_TOKENS_PER_PASS, PASS_WEIGHT = 1.5, 8


@dataclass
class Ahead:
    """How far an exit is with one chain. One call of it may draft many positions.

    Its head has seen the first `num_seen` tokens; `output` [W] is its output for the last of them, None if it has seen
    none. Its `drafts` of later positions hold as long as the chain takes them.
    """

    num_seen: int = 0
    output: Tensor | None = None
    _newest: int | None = None
    drafts: deque[HeadDraft] = field(default_factory=deque)

    def take(self, num_tokens: int) -> HeadDraft | None:
        """The draft of the next position of a chain of `num_tokens` tokens. None if there is none."""
        if not self.drafts:
            return None
        head_draft = self.drafts.popleft()
        self.output = head_draft.output
        self.num_seen, self._newest = num_tokens, head_draft.draft.token
        return head_draft

    def follow(self, token: int) -> None:
        """The chain has been extended by `token`. If the exit has drafted another one, its later drafts are void."""
        if token != self._newest:
            self.drafts.clear()


class DraftBuilder:
    """Builds a chain of drafts after a sequence's last final token.
    The planner later chooses how many of them to verify.

    `best` is the most probable draft so far for the next position, and `best_probability` its probability (see
    `Confidence`). `survival` is the probability that all drafts of the chain are right. `tokens_per_pass`: mean
    tokens that a verify pass has given for this sequence, starting from USUAL_TOKENS_PER_PASS.
    """

    def __init__(self, sequence: DecodingSequence, num_sequences: int) -> None:
        policy, costs = sequence.request.policy, sequence.drafter.costs
        state_depths = sequence.ladder.state_depths if sequence.ladder else ()
        self.sequence = sequence
        self.chain = Speculation(
            sequence,
            len(sequence.tokens) - 1,
            [sequence.tokens[-1]],
            captured={depth: [] for depth in (*sequence.kept_depths, *state_depths)},
            read_length=sequence.read_length,
        )
        # How far each exit is with the chain, by the exit's index.
        self.ahead: defaultdict[int, Ahead] = defaultdict(Ahead)
        self.min_layers = policy.min_layers
        passes = sequence.num_verify_passes
        given = PASS_WEIGHT * USUAL_TOKENS_PER_PASS + passes + sequence.num_accepted
        self.tokens_per_pass = given / (PASS_WEIGHT + passes)
        self._forbids_tokens = sequence.request.sampling.forbids_tokens
        self.survival = 1.0
        self.best: Draft | None = None
        self.best_probability = 0.0
        self._proposals: list[Draft] = []  # all drafts of the next position
        # The verify pass itself gives one token of the answer.
        self._room = min(sequence.num_left_in_regime - 1, costs.max_drafts)
        if policy.max_drafts:
            self._room = min(self._room, policy.max_drafts)
        # Whether proposers have a say in the next position: not where a constraint leaves no choice.
        self.is_open = True
        if policy.name == "full" or sequence.ladder is None:
            self._room = 0
        # If the caller asked for a fixed number of drafts, they are made whether they pay or not.
        self._least_survival = MIN_SURVIVAL
        if self._room > 0 and not policy.max_drafts:
            host_s = sequence.drafter.host_time.per_place_s
            self._least_survival = least_survival(costs, num_sequences, host_s)

    @property
    def _path(self) -> list[int]:
        """The tokens of the chain's drafts."""
        return self.chain.tokens[1:]

    @property
    def room(self) -> int:
        """How many more drafts the chain may have."""
        return self._room - len(self.chain.drafts)

    @property
    def wants_more(self) -> bool:
        """Whether another draft may be worth its place in the verify pass. Not the first one, where so many sequences
        share the pass that even a sure draft would not pay."""
        return self.room > 0 and self.survival > self._least_survival

    def chain_start(self, index: int, proposer: str, states_at: int | None, least: float) -> ChainStart:
        """The tokens that exit `index`, named `proposer`, has not seen, with their states at the depth `states_at`. It
        may go on until survival is below `least` or too low for a place in the verify pass."""
        num_seen, output = self.ahead[index].num_seen, self.ahead[index].output
        return ChainStart(
            tokens=self.chain.tokens[num_seen:],
            place=num_seen,
            room=self.room,
            survival=self.survival,
            factor=self.sequence.confidence.factor(proposer),
            least_survival=max(least, self._least_survival),
            entering=None if states_at is None else torch.stack(self.chain.captured[states_at][num_seen:]),
            begin=self.sequence.settled_states if output is None else output,
        )

    def look_up(self) -> None:
        """Begins the next position with the drafts of the tables. Runs no layer."""
        self._proposals.clear()
        path = self._path
        forced = self._forced(path)
        self.is_open = forced is None
        if not self.is_open:
            self.best, self.best_probability = forced, 1.0
            return
        self.consider(self._proposed(path))

    def consider(self, drafts: Sequence[Draft]) -> None:
        """Adds drafts of the next position.

        Raises `Corrupt` (reason DRAFT_OUT_OF_RANGE) if a draft is not a token of the model. A pass over such a token
        would fail for all sequences that share it.
        """
        # An exit's numbers may overflow. That costs its draft, and must not spread to what is learnt of the exit.
        self._proposals += [draft for draft in self._usable(drafts) if draft.probability > 0.0]
        self.best, self.best_probability = next(iter(self.sequence.confidence.rate(self._proposals)), (None, 0.0))

    def extend(self) -> bool:
        """Appends the best draft to the chain. Returns False if there is none."""
        draft, chain = self.best, self.chain
        if draft is None:
            return False
        probability = self.best_probability
        chain.proposals.append(list(self._proposals))
        chain.append(draft, probability)
        for ahead in self.ahead.values():
            ahead.follow(draft.token)
        self.survival *= probability
        return True

    def _forced(self, path: list[int]) -> Draft | None:
        """The draft of a token without alternative after `path`. None, if the request wants layers to run for it."""
        grammar = self.sequence.grammar
        if grammar is None or self.min_layers > 0:
            return None
        return next(iter(grammar.propose(path)), None)

    def _proposed(self, path: list[int]) -> list[Draft]:
        """What the sequence's proposers say after `path`.
        Nothing, if the request wants layers to run for each draft."""
        if self.min_layers > 0:
            return []
        drafts = [draft for proposer in self.sequence.proposers for draft in proposer.propose(path)]
        grammar = self.sequence.grammar
        if grammar is not None:
            drafts += grammar.propose_begun(path)
        return drafts

    def _usable(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """Those drafts of the next position that the request allows. Raises as `consider` does."""
        size, path = self.sequence.vocabulary_size, self._path
        for draft in drafts:
            if not 0 <= draft.token < size:
                raise Corrupt(
                    f"proposer {draft.proposer} of the router drafted token {draft.token}; the model has {size}",
                    reason="DRAFT_OUT_OF_RANGE",
                )
        if self._forbids_tokens and (forbidden := self.sequence.forbidden_after(path)):
            drafts = [draft for draft in drafts if draft.token not in forbidden]
        grammar = self.sequence.grammar
        return drafts if grammar is None else grammar.cut(path, drafts)
