"""Replays recorded greedy answers: up to which threshold would `relaxed` have differed from the answer, whatever the timing?

Which positions `relaxed` drafts, with which rung and how many in a row depends on costs that the worker measures and on its recent
requests. So the replay follows every chain of drafts that a worker could build. A chain begins at a settled position. Its drafts are
final one after the other, as long as some rung's draft has at least the threshold's probability. While each is the full model's
choice, the text is the recorded one, and so is the input of all later drafts: table lookups see the final tokens and the chain so
far, exits see the true state of the last token and the deep state of the last settled one. The first wrong draft that is final makes
the generation differ. A worker builds some of these chains, so the result is an upper bound of what happens there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calibrator_service.calibration.states.collect import batches, padded
from calibrator_service.calibration.states.labels import greedy_choices
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.training.tables import MAX_CHAIN
from shared.ladder.fused_head import chained as chained_states
from shared.ladder.ladder import Ladder
from shared.ladder.rungs import Draft
from shared.model.contiguous_runner import ContiguousRunner
from shared.ops.chains import ChainStart

# Added to the exits' probabilities, because exits that are served one at a time round differently than in a batch.
ROUNDING = 1e-4

# (token, probability) of each rung's draft.
Drafts = list[tuple[int, float]]


@dataclass
class _Replay:
    """The replay of one answer.

    states: depth -> [S, D] and deep [S, D], float, on the model's device; reach: settled position -> the highest threshold at which
    a chain from there gets as long as the current round's chains; outputs: (settled position, number of the exit) -> a chained
    exit's last output [D] in that chain; highest: the highest threshold at which a wrong draft is final, 0 if there is none.
    """

    sequence: TokenSequence
    states: dict[int, Tensor]
    deep: Tensor
    reach: dict[int, float] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    highest: float = 0.0

    def take(self, settled: int, drafts: Drafts, chained: int) -> float:
        """Takes all rungs' drafts after `chained` earlier ones. Returns the reach of the chain with one more draft."""
        reach, choice = self.reach[settled], self.sequence.tokens[settled + chained + 1]
        wrong = [probability for token, probability in drafts if token != choice]
        right = [probability for token, probability in drafts if token == choice]
        self.highest = max(self.highest, min(reach, max(wrong, default=0.0)))
        return min(reach, max(right, default=0.0))


class Replayer:
    """Replays with one ladder, as it is published, and its model."""

    def __init__(self, ladder: Ladder, runner: ContiguousRunner) -> None:
        self._ladder, self._runner = ladder.bind(runner), runner

    @torch.inference_mode()
    def highest_differing(
        self,
        sequences: Sequence[TokenSequence],
        lowest: float,
        *,
        on_batch: Callable[[], object] = lambda: None,
    ) -> list[float]:
        """Per sequence the highest threshold at which `relaxed` may differ from the answer. Values below `lowest` are not exact.

        It is 1 for an answer that differs from the greedy choices of the runner's own passes: then the answer of a worker's full
        model is unknown.
        """
        highest = [0.0] * len(sequences)
        lengths = [len(sequence.tokens) for sequence in sequences]
        for batch in batches(sorted(range(len(sequences)), key=lengths.__getitem__), lengths):
            on_batch()
            states, deep = self._capture([sequences[i] for i in batch])
            replays = [
                _Replay(sequences[i], {depth: states[depth][row] for depth in states}, deep[row])
                for row, i in enumerate(batch)
            ]
            for replay in replays:
                tokens, start = replay.sequence.tokens, replay.sequence.answer_start
                deep = replay.deep[start - 1 : len(tokens) - 1]
                if tuple(greedy_choices(self._runner, deep).tolist()) != tokens[start:]:
                    replay.highest = 1.0
            self._follow_chains([replay for replay in replays if replay.highest < 1.0], lowest)
            for i, replay in zip(batch, replays, strict=True):
                highest[i] = replay.highest
        return highest

    def _capture(self, sequences: Sequence[TokenSequence]) -> tuple[dict[int, Tensor], Tensor]:
        """(depth -> states [B, S, D], states at depth L [B, S, D]). Rows are padded on the right, where causal attention does not look."""
        runner, depths = self._runner, {*self._ladder.depths, *self._ladder.kept_depths}
        tokens = padded(sequences).to(runner.loaded.device)
        captured = runner.capture(tokens, [*depths, runner.num_layers])
        return {depth: captured[depth] for depth in depths}, captured[runner.num_layers]

    def _follow_chains(self, replays: Sequence[_Replay], lowest: float) -> None:
        """One round per length of a chain; all chains of all replays in each round."""
        for replay in replays:
            # The prompt's deep pass chooses the first token, so the earliest chain begins there.
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
                if reach >= lowest and settled + chained + 2 < len(replay.sequence.tokens):
                    replay.reach[settled] = reach

    def _table_drafts(self, replay: _Replay, chained: int) -> list[Drafts]:
        """The table rungs' drafts for each chain of one replay."""
        tokens, end = replay.sequence.tokens, replay.sequence.answer_start
        drafter, found = self._ladder.new_sequence(tokens[:end]), []
        for settled in replay.reach:
            drafter.append(tokens[end : settled + 1])
            end = settled + 1
            draft = drafter.table_draft(tokens[end : end + chained])
            found.append([(draft.token, draft.probability)] if draft else [])
        return found

    def _exit_drafts(self, places: Sequence[tuple[_Replay, int]], chained: int) -> list[Drafts]:
        """The layer exits' drafts for each (replay, settled position)."""
        found: list[Drafts] = [[] for _ in places]
        if not self._ladder.depths:
            return found
        deep = torch.stack([replay.deep[settled - 1] for replay, settled in places])
        distances = [chained + 1] * len(places)
        for index, depth in enumerate(self._ladder.depths):
            states = torch.stack([r.states[depth][settled + chained] for r, settled in places])
            if depth in (*self._ladder.chained_depths, self._ladder.whole_depth):
                drafts = self._continue_chains(index, places, states, chained)
            else:
                drafts = self._ladder.ask(index, states, deep, distances)
            for own, draft in zip(found, drafts, strict=True):
                own.append((draft.token, draft.probability + ROUNDING))
        return found

    def _continue_chains(
        self, index: int, places: Sequence[tuple[_Replay, int]], states: Tensor, chained: int
    ) -> list[Draft]:
        """The next drafts of an exit that continues chains on its own output, on the weights that a worker on this device drafts with.

        `states` [N, D]: as in `_exit_drafts`, of the chains' last tokens at the exit's depth.
        """
        if chained:
            begins = torch.stack([replay.outputs[settled, index] for replay, settled in places])
        else:
            begins = torch.stack([self._settled_states(*place) for place in places])
        if self._ladder.depths[index] == self._ladder.whole_depth:
            tokens = [replay.sequence.tokens[settled + chained] for replay, settled in places]
            starts = [ChainStart([token], chained, 1, 1.0, 1.0, 0.0) for token in tokens]
            single = [draft for [draft] in self._ladder.whole_chains(begins.unbind(), starts)]
            drafts, outputs = [one.draft for one in single], [one.output for one in single]
        else:
            before = chained_states(begins) if chained else begins
            distances = [chained + 1] * len(places)
            drafts, found = self._ladder.ask_chained(index, before, states, distances)
            outputs = list(found)
        for (replay, settled), output in zip(places, outputs, strict=True):
            replay.outputs[settled, index] = output
        return drafts

    def _settled_states(self, replay: _Replay, settled: int) -> Tensor:
        """States of the last settled token at the depths that chains begin with [3, D]."""
        kept = [replay.states[depth][settled - 1] for depth in self._ladder.kept_depths]
        return torch.stack([*kept, replay.deep[settled - 1]])
