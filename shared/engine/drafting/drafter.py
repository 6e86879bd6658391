"""The drafting half of a step: drafts the next tokens of all sequences of a batch at once."""

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from itertools import groupby, product

from shared.engine.drafting.builder import DraftBuilder
from shared.engine.drafting.confidence import Confidence
from shared.engine.drafting.planner import (
    PassCosts,
    exit_gain_s,
    select_sequences,
)
from shared.engine.drafting.speculation import Speculation, advance_to
from shared.engine.failure import attempt, fail_all
from shared.engine.request.request import GenerationRequest
from shared.engine.request.sequence import Sequence
from shared.ladder.joint_weights import DEFAULT_WEIGHTS, JointWeights
from shared.ladder.ladder import BoundLadder
from shared.ladder.native_chain import HeadDraft
from shared.model.runner import Runner


class Drafter:
    """Asks the layer exits of one bound ladder for drafts. `costs` include those of the exits; `agreements` and `weights` as in `Confidence`."""

    def __init__(
        self,
        runner: Runner,
        costs: PassCosts,
        agreements: Rows[float] = (),
        weights: JointWeights = DEFAULT_WEIGHTS,
    ) -> None:
        self.costs = costs
        self._runner = runner
        # Sampled tokens agree with drafts less often than greedy ones, and a margin accepts more drafts: each kind has its own record.
        self._confidence = {
            kind: Confidence(agreements, weights) for kind in product((True, False), repeat=2)
        }

    def confidence(self, request: GenerationRequest) -> Confidence:
        """What earlier requests of this kind (greedy or sampled, with a margin or without) have shown of the ladder's drafts."""
        return self._confidence[request.sampling.is_greedy, request.policy.margin is not None]

    def builder(self, sequence: Sequence, num_sequences: int, *, drafts: bool) -> DraftBuilder:
        """The builder of a sequence's chain. See `draft_chains`."""
        branches = self._runner.supports_ragged
        return DraftBuilder(sequence, self.costs, num_sequences, drafts=drafts, branches=branches)

    def ask_exits(
        self, ladder: BoundLadder, builders: Rows[DraftBuilder], num_sequences: int
    ) -> None:
        """Takes the chains' last tokens to the layer exits that are expected to pay, shallowest first. Each exit's tokens share a
        pass."""
        for index, depth in enumerate(ladder.depths):
            without = [one for one in builders if not one.ahead[index].has_drafts]
            asked = self._worth_asking(index, depth, without, num_sequences)
            if asked:
                self._propose(ladder, index, asked)
            for one in builders:
                found = one.ahead[index].take(len(one.chain.tokens))
                if found is not None:
                    self._consider(index, one, found)

    def _consider(self, index: int, one: DraftBuilder, found: HeadDraft) -> None:
        before = one.best_probability
        gain = attempt(one.sequence, one.consider, [found.draft, *found.others])
        if gain is not None:
            one.sequence.confidence.record_gain(index, before, gain)

    def _propose(
        self, ladder: BoundLadder, index: int, asked: Rows[tuple[DraftBuilder, float]]
    ) -> None:
        """The exit drafts the asked chains on in one call, each as long as a draft is expected to save its share of the time: what it
        saves is proportional to survival."""
        depth = ladder.depths[index]
        reads_states = depth in ladder.state_depths
        if reads_states:
            chains = [one.chain for one, _ in asked]
            for stop in ladder.state_depths:
                if 0 < stop <= depth:  # a chain needs the states of all its tokens there
                    advance_to(stop, chains, self._runner)
            if depth == 0:
                keep_embeddings(chains, self._runner)
        share_s = self.costs.exits[index].of(len(asked)) / len(asked)
        begins = [one.chain_begin(index) for one, _ in asked]
        starts = [
            one.chain_start(index, depth, reads_states, one.survival * share_s / gain_s)
            for one, gain_s in asked
        ]
        chains_drafts = ladder.propose(index, begins, starts)
        for (one, _), drafts in zip(asked, chains_drafts, strict=True):
            one.ahead[index].put(drafts)

    def _worth_asking(
        self, index: int, depth: int, builders: Rows[DraftBuilder], num_sequences: int
    ) -> list[tuple[DraftBuilder, float]]:
        """The chains whose last tokens are worth taking to exit `index` at `depth` in one pass, and the seconds that each is expected
        to save."""
        allowed = [one for one in builders if depth >= one.min_layers]
        gains_s = [
            exit_gain_s(
                one.survival,
                one.sequence.confidence.expected_gain(index, one.best_probability),
                self.costs,
                num_sequences,
                one.tokens_per_pass,
            )
            for one in allowed
        ]
        chosen = select_sequences(gains_s, self.costs.exits[index])
        return [(allowed[place], gains_s[place]) for place in chosen]


def draft_chains(
    members: Iterable[tuple[Sequence, Drafter]], num_sequences: int, *, drafts: bool = True
) -> list[Speculation]:
    """Each member's last final token and its drafts. `num_sequences` sequences will share the deep pass.

    Drafts in rounds of one draft per sequence, so that all sequences that ask the same exit share one shallow pass, one launch and
    one read-back. If `drafts` is false, only requests draft for which the engine may not choose (see `may_skip_drafting`). There
    may be several members only if the runner supports ragged batches. A sequence that fails has a `failure` afterwards: alone if the work was its
    own, with all that shared an exit if the exit failed.
    """
    growing = [
        (drafter.builder(sequence, num_sequences, drafts=drafts), drafter)
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
    for one, _ in growing:
        if one.sequence.failure is None:
            attempt(one.sequence, one.grow_branches)
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


def keep_embeddings(chains: Rows[Speculation], runner: Runner) -> None:
    """Completes `kept[0]` of the chains: the states at depth 0 of all their tokens."""
    missing = [(chain, i) for chain in chains for i in range(len(chain.kept[0]), len(chain.tokens))]
    states = runner.embed_tokens(
        [chain.tokens[i] for chain, i in missing], [chain.base + i for chain, i in missing]
    )
    for (chain, _), state in zip(missing, states, strict=True):
        chain.kept[0].append(state)
