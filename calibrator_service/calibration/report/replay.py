"""Replays recorded greedy answers: at which thresholds and margins would `relaxed` have differed from the answer,
whatever the timing?

Which positions `relaxed` drafts, with which rung and how many in a row depends on costs that the worker measures and on
its recent requests. So the replay follows every chain of drafts that a worker could build. A chain begins at a settled
position. While each of its drafts is the full model's choice, the text is the recorded one, and so is the input of all
later drafts: table lookups see the final tokens and the chain so far, exits see the states of the last settled token
and continue on their own output. The first wrong draft that is accepted makes the generation differ, so what a worker
would write after it does not matter. With a threshold, it is accepted if it and all drafts before it have at least the
threshold's probability. With a margin, it is accepted if the full model's log-probability of its own choice exceeds the
draft's by at most the margin. A worker builds some of these chains, so the result is an upper bound of what happens
there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calibrator_service.calibration.states.collect import batches, padded
from calibrator_service.calibration.states.labels import greedy_choices
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.training.tables import MAX_CHAIN
from shared.ladder.ladder import Ladder
from shared.ladder.rungs import Draft
from shared.ladder.table_proposer import TableProposer
from shared.model.contiguous_runner import ContiguousRunner
from shared.ops.chains import ChainStart

# Added to the exits' probabilities and taken from margins: what is served one at a time may round differently than in a
# batch.
ROUNDING = 1e-4

# (token, probability) of each rung's draft.
Drafts = list[tuple[int, float]]


@dataclass(frozen=True)
class Differing:
    """From which settings on `relaxed` may differ from one answer: up to `threshold` (0: at none), from `margin` on
    (inf: at none)."""

    threshold: float
    margin: float


@dataclass
class _Replay:
    """The replay of one answer.

    states: depth -> [S, D] and deep [S, D], float, on the model's device; reach: settled position -> the highest
    threshold at which a chain from there gets as long as the current round's chains; outputs: (settled position, number
    of the exit) -> the exit's last output [D] in that chain; highest: the highest threshold at which a wrong draft is
    final, 0 if there is none; wrong: (position, token) of all wrong drafts.
    """

    sequence: TokenSequence
    states: dict[int, Tensor]
    deep: Tensor
    reach: dict[int, float] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    highest: float = 0.0
    wrong: set[tuple[int, int]] = field(default_factory=set)

    def take(self, settled: int, drafts: Drafts, chained: int) -> float:
        """Takes all rungs' drafts after `chained` earlier ones. Returns the reach of the chain with one more draft."""
        position = settled + chained + 1
        reach, choice = self.reach[settled], self.sequence.tokens[position]
        wrong = [probability for token, probability in drafts if token != choice]
        right = [probability for token, probability in drafts if token == choice]
        self.highest = max(self.highest, min(reach, max(wrong, default=0.0)))
        self.wrong |= {(position, token) for token, _ in drafts if token != choice}
        return min(reach, max(right, default=0.0))


class Replayer:
    """Replays with one ladder, as it is published, and its model."""

    def __init__(self, ladder: Ladder, runner: ContiguousRunner) -> None:
        self._ladder, self._runner = ladder.bind(runner), runner

    @torch.inference_mode()
    def differing(
        self, sequences: Sequence[TokenSequence], *, on_batch: Callable[[], object] = lambda: None
    ) -> list[Differing]:
        """Per sequence the thresholds and margins at which `relaxed` may differ from the answer.

        These are all, for an answer that differs from the greedy choices of the runner's own passes: then the answer of
        a worker's full model is unknown.
        """
        differing = [Differing(1.0, 0.0)] * len(sequences)
        lengths = [len(sequence.tokens) for sequence in sequences]
        for batch in batches(sorted(range(len(sequences)), key=lengths.__getitem__), lengths):
            on_batch()
            states, deep = self._capture([sequences[i] for i in batch])
            replays = [
                _Replay(sequences[i], {depth: states[depth][row] for depth in states}, deep[row])
                for row, i in enumerate(batch)
            ]
            known = {i: replay for i, replay in zip(batch, replays, strict=True) if self._is_known(replay)}
            self._follow_chains(list(known.values()))
            for i, replay in known.items():
                differing[i] = Differing(replay.highest, self._least_margin(replay))
        return differing

    def _is_known(self, replay: _Replay) -> bool:
        """Whether the answer is what the runner's own passes choose."""
        tokens, start = replay.sequence.tokens, replay.sequence.answer_start
        deep = replay.deep[start - 1 : len(tokens) - 1]
        return tuple(greedy_choices(self._runner, deep).tolist()) == tokens[start:]

    def _least_margin(self, replay: _Replay) -> float:
        """The smallest margin at which the full model accepts one of the wrong drafts."""
        if not replay.wrong:
            return math.inf
        positions, tokens = torch.tensor(sorted(replay.wrong)).to(replay.deep.device).unbind(1)
        scored, rows = positions.unique(return_inverse=True)
        logits = self._runner.logits(replay.deep[scored - 1])  # which chose the tokens at `scored`
        gaps = logits.amax(-1)[rows] - logits[rows, tokens]
        return max(float(gaps.min()) - ROUNDING, 0.0)

    def _capture(self, sequences: Sequence[TokenSequence]) -> tuple[dict[int, Tensor], Tensor]:
        """(depth -> states [B, S, D], states at depth L [B, S, D]).
        Rows are padded on the right, where causal attention does not look."""
        runner, depths = self._runner, {*self._ladder.depths, *self._ladder.kept_depths}
        tokens = padded(sequences).to(runner.loaded.device)
        captured = runner.capture(tokens, [*depths, runner.num_layers])
        return {depth: captured[depth] for depth in depths}, captured[runner.num_layers]

    def _follow_chains(self, replays: Sequence[_Replay]) -> None:
        """One round per length of a chain; all chains of all replays in each round."""
        for replay in replays:
            # The prompt's verify pass chooses the first token, so the earliest chain begins there.
            first, end = replay.sequence.answer_start, len(replay.sequence.tokens)
            replay.reach = dict.fromkeys(range(first, end - 1), 1.0)
        for chained in range(MAX_CHAIN):
            places = [(replay, settled) for replay in replays for settled in replay.reach]
            if not places:
                return
            tables = [d for replay in replays for d in self._table_drafts(replay, chained)]
            exits = self._exit_drafts(places, chained)
            reaches = [
                (replay, settled, replay.take(settled, [*table, *others], chained))
                for (replay, settled), table, others in zip(places, tables, exits, strict=True)
            ]
            for replay in replays:
                replay.reach = {}
            for replay, settled, reach in reaches:
                if reach > 0.0 and settled + chained + 2 < len(replay.sequence.tokens):
                    replay.reach[settled] = reach

    def _table_drafts(self, replay: _Replay, chained: int) -> list[Drafts]:
        """The table rungs' drafts for each chain of one replay."""
        tokens, end = replay.sequence.tokens, replay.sequence.answer_start
        drafter, drafts = TableProposer(self._ladder.ladder, tokens[:end]), []
        for settled in replay.reach:
            drafter.append(tokens[end : settled + 1])
            end = settled + 1
            draft = drafter.best(tokens[end : end + chained])
            drafts.append([(draft.token, draft.probability)] if draft else [])
        return drafts

    def _exit_drafts(self, places: Sequence[tuple[_Replay, int]], chained: int) -> list[Drafts]:
        """The layer exits' drafts for each (replay, settled position)."""
        by_place: list[Drafts] = [[] for _ in places]
        if not self._ladder.depths:
            return by_place
        for index, depth in enumerate(self._ladder.depths):
            states = torch.stack([r.states[depth][settled + chained] for r, settled in places])
            drafts = self._continue_chains(index, places, states, chained)
            for of_place, draft in zip(by_place, drafts, strict=True):
                of_place.append((draft.token, draft.probability + ROUNDING))
        return by_place

    def _continue_chains(
        self, index: int, places: Sequence[tuple[_Replay, int]], states: Tensor, chained: int
    ) -> list[Draft]:
        """The next drafts of an exit that continues chains on its own output, on the weights that a worker on this
        device drafts with.

        `states` [N, D]: as in `_exit_drafts`, of the chains' last tokens at the exit's depth.
        """
        if chained:
            begins = [replay.outputs[settled, index] for replay, settled in places]
        else:
            begins = [self._settled_states(*place) for place in places]
        starts = [
            ChainStart([r.sequence.tokens[s + chained]], chained, 1, 1.0, 1.0, 0.0, state, begin)
            for (r, s), state, begin in zip(places, states.split(1), begins, strict=True)
        ]
        single = [draft for [draft] in self._ladder.propose(index, starts)]
        drafts, outputs = [proposal.draft for proposal in single], [proposal.output for proposal in single]
        for (replay, settled), output in zip(places, outputs, strict=True):
            replay.outputs[settled, index] = output
        return drafts

    def _settled_states(self, replay: _Replay, settled: int) -> Tensor:
        """States of the last settled token at the depths that chains begin with [3, D]."""
        captured = [replay.states[depth][settled - 1] for depth in self._ladder.kept_depths]
        return torch.stack([*captured, replay.deep[settled - 1]])
