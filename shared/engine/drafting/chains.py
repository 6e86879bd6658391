"""The drafting half of a step: the next tokens of all sequences of a batch at once, without an object per draft.

Tables, joint confidence, rounds and plan are native: see `shared.ops.drafting.Step`. Here are the exits that it asks
for, which need the device, and the constraints, which are a library of their own.
"""

import time
from collections.abc import Sequence

import torch

from shared.engine.drafting.drafter import KeyTime
from shared.engine.drafting.speculation import Speculation, advance_to
from shared.engine.failure import attempt, fail_all
from shared.engine.request.sequence import DecodingSequence
from shared.errors import Corrupt
from shared.model.runner import Runner
from shared.ops.chains import ChainStart
from shared.ops.drafting import AskedChain, DraftedChain, Step


class Drafting:
    """Drafts for the sequences of one model, step by step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._step = Step()
        self.key_time = KeyTime()

    def draft(self, sequences: Sequence[DecodingSequence], num_other_tokens: int = 0) -> list[Speculation]:
        """Each sequence's last final token and the drafts that are worth their place in a pass that all of them share,
        with `num_other_tokens` other tokens (pieces of prompts).

        All sequences that ask the same exit share one shallow pass, one launch and one read-back. There may be several
        only if the runner supports ragged batches. A sequence that fails has a `failure` afterwards and is not in the
        result: alone if the work was its own, with all that shared an exit if the exit failed.
        """
        if not sequences:
            return []
        chains, tables, rooms, least, are_fixed, num_keys, limited = [], [], [], [], [], [], []
        for row, sequence in enumerate(sequences):
            chain, policy, room = _new_chain(sequence), sequence.request.policy, sequence.draft_room
            chains.append(chain)
            tables.append(sequence.tables.handle.address)
            rooms.append(room)
            least.append(policy.min_layers)
            are_fixed.append(policy.max_drafts > 0)
            num_keys.append(chain.base)
            if room > 0 and sequence.limits_drafts:
                limited.append(row)
        extra_s, keys_s = self.key_time.of(num_keys)
        self._step.begin(tables, rooms, least, are_fixed, len(sequences), num_other_tokens, extra_s, keys_s)
        for row in limited:
            forced = attempt(sequences[row], sequences[row].forced_after, [], rooms[row])
            if forced is not None:
                self._step.go_on(row, 0, *forced)
        outputs: list[torch.Tensor] = []
        self._ask_exits(chains, outputs)
        drafted = self._step.read()
        num_kept = dict.fromkeys(limited, -1)
        while limited:
            limited = [row for row in limited if self._goes_on(row, sequences[row], drafted[row], rooms, num_kept)]
            if limited:
                self._ask_exits(chains, outputs)
            drafted = self._step.read()
        whole = []
        for chain, found, length in zip(chains, drafted, self._step.plan(), strict=True):
            attempt(chain.sequence, _take, chain, found, length)
            if chain.sequence.failure is None:
                whole.append(chain)
        return whole

    def _goes_on(
        self,
        row: int,
        sequence: DecodingSequence,
        drafted: DraftedChain,
        rooms: Sequence[int],
        num_kept: dict[int, int],
    ) -> bool:
        """Cuts a chain where its request does not allow a draft, and lets it go on with what a constraint forces there.
        Whether it goes on: only if more is kept than before."""
        if sequence.failure is not None or not drafted.is_sound:
            return False
        kept = attempt(sequence, sequence.num_allowed, drafted.tokens)
        if kept is None:
            return False
        forced, begun = None, None
        if kept > num_kept[row]:
            num_kept[row], tokens = kept, drafted.tokens[:kept]
            forced, begun = attempt(sequence, sequence.forced_after, tokens, rooms[row] - kept) or (None, None)
        self._step.go_on(row, kept, forced or (), begun)
        return bool(forced) or begun is not None

    def _ask_exits(self, chains: Sequence[Speculation], outputs: list[torch.Tensor]) -> None:
        """Lets the step draft on, with the exits that it asks for. Adds their outputs, call by call."""
        while True:
            index, asked = self._step.advance()
            if not asked:
                return
            try:
                outputs.append(self._propose(index, asked, chains, outputs))
            except Exception as error:
                failed = [chains[row].sequence for row in self._step.drop()]
                fail_all(failed, error, "asking exits failed for")

    def _propose(
        self, index: int, asked: Sequence[AskedChain], chains: Sequence[Speculation], outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """One call of an exit. Returns its outputs [asked, K, W]."""
        ladder = chains[asked[0].row].sequence.ladder
        assert ladder is not None
        depth = ladder.depths[index]
        reads_states = depth in ladder.state_depths
        if reads_states:
            self._take_to(depth, ladder.state_depths, asked, chains)
        starts = []
        for one in asked:
            chain = chains[one.row]
            call, row, place = one.output
            begin = chain.sequence.settled_states if call < 0 else outputs[call][row, place]
            starts.append(
                ChainStart(
                    tokens=[chain.tokens[0], *one.drafts][one.num_seen :],
                    place=one.num_seen,
                    room=one.room,
                    survival=one.survival,
                    factor=one.factor,
                    least_survival=one.least_survival,
                    begin=begin,
                    entering=torch.stack(chain.captured[depth][one.num_seen :]) if reads_states else None,
                )
            )
        start_s = time.perf_counter()
        found = ladder.propose(index, starts)
        seconds = time.perf_counter() - start_s
        drafter = chains[asked[0].row].sequence.drafter
        drafter.record_call(index, seconds, len(asked), int(found.lengths.max()))
        self._step.give(found.tokens, found.probabilities, found.lengths)
        return found.outputs

    def _take_to(
        self, depth: int, state_depths: Sequence[int], asked: Sequence[AskedChain], chains: Sequence[Speculation]
    ) -> None:
        """Takes the asked chains' tokens to the depth of an exit that reads their states."""
        parts = [chains[one.row] for one in asked]
        for part, one in zip(parts, asked, strict=True):
            part.follow(one.drafts)
        for stop in state_depths:
            if 0 < stop <= depth:  # a chain needs the states of all its tokens there
                advance_to(stop, parts, self._runner)
        if depth == 0:
            _capture_embeddings(parts, self._runner)


def _new_chain(sequence: DecodingSequence) -> Speculation:
    state_depths = sequence.ladder.state_depths if sequence.ladder else ()
    captured: dict[int, list[torch.Tensor]] = {depth: [] for depth in (*sequence.kept_depths, *state_depths)}
    base, newest = len(sequence.tokens) - 1, sequence.tokens[-1]
    return Speculation(sequence, base, [newest], [0], [None], captured=captured, read_length=sequence.read_length)


def _take(chain: Speculation, drafted: DraftedChain, length: int) -> None:
    """Gives the chain its drafts. Raises `Corrupt` (reason DRAFT_OUT_OF_RANGE) if one is not a token of the model: a
    pass over it would fail for all sequences that share it."""
    if not drafted.is_sound:
        name, size = chain.sequence.drafter.names[drafted.proposers[0]], chain.sequence.vocabulary_size
        raise Corrupt(
            f"proposer {name} of the router drafted token {drafted.tokens[0]}; the model has {size}",
            reason="DRAFT_OUT_OF_RANGE",
        )
    chain.follow(drafted.tokens[:length])
    chain.proposers, chain.probabilities = drafted.proposers[:length], drafted.probabilities[:length]
    chain.sequence.num_drafted += length


def _capture_embeddings(chains: Sequence[Speculation], runner: Runner) -> None:
    """Completes `captured[0]` of the chains: the states at depth 0 of all their tokens."""
    missing = [(chain, i) for chain in chains for i in range(len(chain.captured[0]), len(chain.tokens))]
    states = runner.embed_tokens([chain.tokens[i] for chain, i in missing], [chain.base + i for chain, i in missing])
    for (chain, _), state in zip(missing, states, strict=True):
        chain.captured[0].append(state)
