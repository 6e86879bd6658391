"""Recorded greedy answers gone through again: from which threshold on would relaxed have said something else, whatever the timing?

Which positions relaxed drafts, with which rung and how many in a row, depends on costs that the worker measures and on what it has
just served. So every chain is followed that a worker could build. A chain begins at a settled position; its drafts are final one
after the other while some rung's draft has at least the threshold's probability. As long as each is the full model's choice, the
text is the recorded one, and so is all that later drafts see: table lookups see the final tokens and the drafts chained so far,
exits the true state of the last token and the deep state of the last settled one. The first wrong draft that is final makes the
generation differ. A worker builds some of these chains, so what is found here bounds from above what happens there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calibrator_service.calibration.collect import batches
from calibrator_service.calibration.labels import greedy_choices
from calibrator_service.calibration.shards import TokenSequence
from calibrator_service.calibration.tables import MAX_CHAIN
from shared.ladder.ladder import Ladder
from shared.model.runner import Runner

# Added to what exits say: one at a time, as they are served, they round differently than together.
ROUNDING = 1e-4

# Token and probability.
Drafts = list[tuple[int, float]]


@dataclass
class _Replay:
    """One answer. `reach`: settled position -> the highest threshold at which a chain from there gets as long as the round has it.

    states: depth -> [S, D] and deep [S, D], float, on the model's device; `highest`: the highest threshold at which something
    wrong is final, 0 where that is none.
    """

    sequence: TokenSequence
    states: dict[int, Tensor]
    deep: Tensor
    reach: dict[int, float] = field(default_factory=dict)
    highest: float = 0.0

    def take(self, settled: int, drafts: Drafts, chained: int) -> float:
        """What the rungs say after `chained` drafts; returns the chain's reach with one more."""
        reach, choice = self.reach[settled], self.sequence.tokens[settled + chained + 1]
        wrong = [probability for token, probability in drafts if token != choice]
        right = [probability for token, probability in drafts if token == choice]
        self.highest = max(self.highest, min(reach, max(wrong, default=0.0)))
        return min(reach, max(right, default=0.0))


class Replayer:
    """For a ladder and its model; `ladder` as it is published."""

    def __init__(self, ladder: Ladder, runner: Runner) -> None:
        self._ladder, self._runner = ladder.bind(runner), runner

    @torch.inference_mode()
    def highest_differing(
        self,
        sequences: Sequence[TokenSequence],
        lowest: float,
        *,
        on_batch: Callable[[], object] = lambda: None,
    ) -> list[float]:
        """Per sequence the highest threshold at which some timing of relaxed differs from its answer; what is below `lowest` is not exact.

        1 for an answer that is not what the runner's own passes choose greedily: what a worker's full model says is unknown then.
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
            self._replay([replay for replay in replays if replay.highest < 1.0], lowest)
            for i, replay in zip(batch, replays, strict=True):
                highest[i] = replay.highest
        return highest

    def _capture(self, sequences: Sequence[TokenSequence]) -> tuple[dict[int, Tensor], Tensor]:
        """Depth -> states [B, S, D], and those at depth L. Padded at the right, where a causal model does not look."""
        runner, width = self._runner, max(len(sequence.tokens) for sequence in sequences)
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        depths = [*self._ladder.depths, runner.num_layers]
        captured = runner.capture(tokens.to(runner.loaded.device), depths)
        return {depth: captured[depth] for depth in self._ladder.depths}, captured[
            runner.num_layers
        ]

    def _replay(self, replays: Sequence[_Replay], lowest: float) -> None:
        for replay in replays:
            # The prompt's deep pass chooses the first token, so a chain begins there at the earliest.
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
        tokens, end = replay.sequence.tokens, replay.sequence.answer_start
        drafter, found = self._ladder.new_sequence(tokens[:end]), []
        for settled in replay.reach:
            drafter.append(tokens[end : settled + 1])
            end = settled + 1
            draft = drafter.table_draft(tokens[end : end + chained])
            found.append([(draft.token, draft.probability)] if draft else [])
        return found

    def _exit_drafts(self, places: Sequence[tuple[_Replay, int]], chained: int) -> list[Drafts]:
        found: list[Drafts] = [[] for _ in places]
        if not self._ladder.depths:
            return found
        deep = torch.stack([replay.deep[settled - 1] for replay, settled in places])
        distances = [chained + 1] * len(places)
        for index, depth in enumerate(self._ladder.depths):
            states = torch.stack([r.states[depth][settled + chained] for r, settled in places])
            tokens, probabilities = self._ladder.exits(index, states, deep, distances)
            probabilities = probabilities + ROUNDING
            for drafts, *draft in zip(found, tokens.tolist(), probabilities.tolist(), strict=True):
                drafts.append((draft[0], draft[1]))
        return found
