"""The drafting half of a step: drafts the next tokens of all sequences of a batch at once."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product

from shared.engine.drafting.builder import DraftBuilder
from shared.engine.drafting.confidence import Confidence
from shared.engine.drafting.planner import PassCosts, exit_gain_s, select_sequences
from shared.engine.drafting.speculation import Speculation, advance_to
from shared.engine.failure import attempt, fail_all
from shared.engine.request.request import GenerationRequest
from shared.engine.request.sequence import DecodingSequence
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.ladder import BoundLadder
from shared.model.runner import Runner

# Weight of earlier steps in the mean of the host's time, per step with drafts and per step without.
DECAY, REST_DECAY = 0.95, 0.99


class HostTime:
    """The mean time that the host takes for one place of a chain, without the time of exits. The device waits
    meanwhile, which matters where a pass takes a GPU a millisecond or two (decision 008)."""

    def __init__(self) -> None:
        self._seconds = self._places = 0.0
        self._has_begun = False

    @property
    def per_place_s(self) -> float:
        return self._seconds / self._places if self._places else 0.0

    def record(self, seconds: float, num_places: int) -> None:
        """A step took `seconds` for `num_places` places. The first such step does not count, because it reads tables
        from their files. Without any places the mean shrinks, so that drafting which was too slow to pay is tried
        again."""
        if num_places and not self._has_begun:
            self._has_begun = True
        elif num_places:
            self._seconds = DECAY * self._seconds + seconds
            self._places = DECAY * self._places + num_places
        else:
            self._seconds *= REST_DECAY


class Drafter:
    """Drafts with one bound ladder; without one, never. `costs` include those of the ladder's exits."""

    def __init__(self, runner: Runner, costs: PassCosts, ladder: BoundLadder | None = None) -> None:
        self.costs = costs
        self.ladder = ladder
        self.host_time = HostTime()
        self._runner = runner
        weights = ladder.joint_weights if ladder else DEFAULT_WEIGHTS
        # Sampled tokens agree with drafts less often than greedy ones, changed scores less often than the model's own,
        # and relaxed accepts more drafts: each kind has its own record.
        self._confidence = {kind: Confidence(weights) for kind in product((True, False), repeat=3)}

    def confidence(self, request: GenerationRequest) -> Confidence:
        """What earlier requests of this kind (greedy or sampled, with changed scores, relaxed or not) have
        shown of the ladder's drafts."""
        sampling, is_relaxed = request.sampling, request.policy.name == "relaxed"
        return self._confidence[sampling.is_greedy, sampling.changes_scores, is_relaxed]

    def builder(self, sequence: DecodingSequence, num_sequences: int) -> DraftBuilder:
        """The builder of a sequence's chain. See `draft_chains`."""
        return DraftBuilder(sequence, self.costs, num_sequences, self.host_time.per_place_s)

    def ask_exits(self, builders: Sequence[DraftBuilder], num_sequences: int) -> float:
        """Takes the chains' last tokens to the layer exits that are expected to pay, shallowest first. Each exit's
        tokens share a pass. Returns the seconds that the exits took."""
        assert self.ladder is not None
        exits_s = 0.0
        for index, depth in enumerate(self.ladder.depths):
            without = [builder for builder in builders if builder.is_open and not builder.ahead[index].drafts]
            asked = self._worth_asking(index, depth, without, num_sequences)
            if asked:
                start_s = time.perf_counter()
                self._propose(self.ladder, index, asked)
                exits_s += time.perf_counter() - start_s
            for builder in builders:
                head_draft = builder.ahead[index].take(len(builder.chain.tokens))
                if head_draft is not None and builder.is_open:
                    attempt(builder.sequence, builder.consider, [head_draft.draft])
        return exits_s

    def _propose(self, ladder: BoundLadder, index: int, asked: Sequence[tuple[DraftBuilder, float]]) -> None:
        """The exit drafts the asked chains on in one call, each as long as a draft is expected to save its share of the
        time: what it saves is proportional to survival."""
        depth = ladder.depths[index]
        states_at = depth if depth in ladder.state_depths else None
        if states_at is not None:
            chains = [builder.chain for builder, _ in asked]
            for stop in ladder.state_depths:
                if 0 < stop <= depth:  # a chain needs the states of all its tokens there
                    advance_to(stop, chains, self._runner)
            if depth == 0:
                capture_embeddings(chains, self._runner)
        share_s = self.costs.exits[index].of(len(asked)) / len(asked)
        starts = [
            builder.chain_start(index, ladder.names[index], states_at, builder.survival * share_s / gain_s)
            for builder, gain_s in asked
        ]
        chains_drafts = ladder.propose(index, starts)
        for (builder, _), drafts in zip(asked, chains_drafts, strict=True):
            builder.ahead[index].drafts.extend(drafts)

    def _worth_asking(
        self, index: int, depth: int, builders: Sequence[DraftBuilder], num_sequences: int
    ) -> list[tuple[DraftBuilder, float]]:
        """The chains whose last tokens are worth taking to exit `index` at `depth` in one pass, and the seconds that
        each is expected to save."""
        assert self.ladder is not None
        agreement, rung = self.ladder.agreements[index], self.ladder.names[index]
        allowed = [builder for builder in builders if depth >= builder.min_layers]
        gains_s = [
            exit_gain_s(
                builder.survival,
                builder.sequence.confidence.expected_gain(rung, agreement, builder.best_probability),
                self.costs,
                num_sequences,
                builder.tokens_per_pass,
            )
            for builder in allowed
        ]
        chosen = select_sequences(gains_s, self.costs.exits[index])
        return [(allowed[place], gains_s[place]) for place in chosen]


def draft_chains(sequences: Iterable[DecodingSequence], num_sequences: int) -> list[Speculation]:
    """Each sequence's last final token and its drafts. `num_sequences` sequences will share the verify pass.

    Drafts in rounds of one draft per sequence, so that all sequences that ask the same exit share one shallow pass, one
    launch and one read-back. There may be several only if the runner supports ragged batches. A sequence that fails has
    a `failure` afterwards: alone if the work was its own, with all that shared an exit if the exit failed.
    """
    start_s, exits_s = time.perf_counter(), 0.0
    builders = [sequence.drafter.builder(sequence, num_sequences) for sequence in sequences]
    going = [builder for builder in builders if builder.wants_more]
    while going:
        by_drafter: defaultdict[Drafter, list[DraftBuilder]] = defaultdict(list)
        for builder in going:
            attempt(builder.sequence, builder.look_up)
            if builder.sequence.failure is None:  # several versions of a router may serve at once
                by_drafter[builder.sequence.drafter].append(builder)
        for drafter, asking in by_drafter.items():
            try:
                exits_s += drafter.ask_exits(asking, num_sequences)
            except Exception as error:
                fail_all([builder.sequence for builder in asking], error, "asking exits failed for")
        going = [
            builder for builder in going if builder.sequence.failure is None and builder.extend() and builder.wants_more
        ]
    seconds = time.perf_counter() - start_s - exits_s
    num_places = sum(len(builder.chain.proposals) for builder in builders)
    for drafter in {builder.sequence.drafter for builder in builders}:
        drafter.host_time.record(seconds, num_places)
    return [builder.chain for builder in builders]


def capture_embeddings(chains: Sequence[Speculation], runner: Runner) -> None:
    """Completes `captured[0]` of the chains: the states at depth 0 of all their tokens."""
    missing = [(chain, i) for chain in chains for i in range(len(chain.captured[0]), len(chain.tokens))]
    states = runner.embed_tokens([chain.tokens[i] for chain, i in missing], [chain.base + i for chain, i in missing])
    for (chain, _), state in zip(missing, states, strict=True):
        chain.captured[0].append(state)
