"""The drafting half of a step: drafts the next tokens of all sequences of a batch at once."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from shared.engine.drafting.builder import DraftBuilder
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.planner import chain_gain_s, exit_gain_s, select_sequences
from shared.engine.drafting.speculation import Speculation, advance_to
from shared.engine.failure import attempt, fail_all
from shared.engine.request.sequence import DecodingSequence
from shared.ladder.ladder import BoundLadder
from shared.model.runner import Runner

# Whom to ask for another draft, and the seconds that its first draft is expected to save.
_Asked = Sequence[tuple[DraftBuilder, float]]


def draft_chains(sequences: Iterable[DecodingSequence], num_sequences: int) -> list[Speculation]:
    """Each sequence's last final token and its drafts. `num_sequences` sequences will share the verify pass.

    Drafts in rounds of one draft per sequence, so that all sequences that ask the same exit share one shallow pass, one
    launch and one read-back. There may be several only if the runner supports ragged batches. A sequence that fails has
    a `failure` afterwards: alone if the work was its own, with all that shared an exit if the exit failed.
    """
    start_s, exits_s = time.perf_counter(), 0.0
    builders = [DraftBuilder(sequence, num_sequences) for sequence in sequences]
    going = [builder for builder in builders if builder.wants_more]
    while going:
        by_drafter: defaultdict[Drafter, list[DraftBuilder]] = defaultdict(list)
        for builder in going:
            attempt(builder.sequence, builder.look_up)
            if builder.sequence.failure is None:  # several versions of a router may serve at once
                by_drafter[builder.sequence.drafter].append(builder)
        for drafter, asking in by_drafter.items():
            try:
                exits_s += _ask_exits(drafter, asking, num_sequences)
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


def _ask_exits(drafter: Drafter, builders: Sequence[DraftBuilder], num_sequences: int) -> float:
    """Takes the chains' last tokens to the layer exits that are expected to pay, shallowest first. Each exit's tokens
    share a pass. Returns the seconds that the exits took."""
    assert drafter.ladder is not None
    exits_s = 0.0
    for index in range(len(drafter.ladder.depths)):
        without = [builder for builder in builders if builder.is_open and not builder.ahead[index].drafts]
        asked = _worth_asking(drafter, drafter.ladder, index, without, num_sequences)
        if asked:
            start_s = time.perf_counter()
            _propose(drafter, drafter.ladder, index, asked)
            exits_s += time.perf_counter() - start_s
        for builder in builders:
            head_draft = builder.ahead[index].take(len(builder.chain.tokens))
            if head_draft is not None and builder.is_open:
                attempt(builder.sequence, builder.consider, [head_draft.draft])
    return exits_s


def _worth_asking(
    drafter: Drafter, ladder: BoundLadder, index: int, builders: Sequence[DraftBuilder], num_sequences: int
) -> _Asked:
    """The chains whose last tokens are worth taking to an exit in one call: those that save more, with all that the
    call drafts, than the call costs. And the seconds that the first draft of each is expected to save."""
    agreement, proposer, cost = ladder.agreements[index], ladder.names[index], drafter.costs.exits[index]
    allowed = [builder for builder in builders if ladder.depths[index] >= builder.min_layers]
    gains_s = [
        exit_gain_s(
            builder.survival,
            builder.sequence.confidence.expected_gain(proposer, agreement, builder.best_probability),
            drafter.costs,
            num_sequences,
            builder.tokens_per_pass,
        )
        for builder in allowed
    ]
    whole_s = [
        chain_gain_s(gain_s, agreement * builder.sequence.confidence.factor(proposer), cost, builder.room)
        for builder, gain_s in zip(allowed, gains_s, strict=True)
    ]
    chosen = select_sequences(whole_s, cost)
    return [(allowed[place], gains_s[place]) for place in chosen]


def _propose(drafter: Drafter, ladder: BoundLadder, index: int, asked: _Asked) -> None:
    """The exit drafts the asked chains on in one call, each as long as a further draft is expected to save what it
    costs itself: what it saves is proportional to survival. The call is paid for already."""
    depth = ladder.depths[index]
    states_at = depth if depth in ladder.state_depths else None
    if states_at is not None:
        chains = [builder.chain for builder, _ in asked]
        for stop in ladder.state_depths:
            if 0 < stop <= depth:  # a chain needs the states of all its tokens there
                advance_to(stop, chains, drafter.runner)
        if depth == 0:
            _capture_embeddings(chains, drafter.runner)
    each_draft_s = drafter.costs.exits[index].each_draft_s
    starts = [
        builder.chain_start(index, ladder.names[index], states_at, builder.survival * each_draft_s / gain_s)
        for builder, gain_s in asked
    ]
    chains_drafts = ladder.propose(index, starts)
    for (builder, _), drafts in zip(asked, chains_drafts, strict=True):
        builder.ahead[index].drafts.extend(drafts)


def _capture_embeddings(chains: Sequence[Speculation], runner: Runner) -> None:
    """Completes `captured[0]` of the chains: the states at depth 0 of all their tokens."""
    missing = [(chain, i) for chain in chains for i in range(len(chain.captured[0]), len(chain.tokens))]
    states = runner.embed_tokens([chain.tokens[i] for chain, i in missing], [chain.base + i for chain, i in missing])
    for (chain, _), state in zip(missing, states, strict=True):
        chain.captured[0].append(state)
