"""Passes of a ragged batch in which tokens leave at a depth for good, or in which some layers are left out for all tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from shared.model.contiguous_runner import ContiguousRunner
from shared.model.ragged import RaggedSequence

# States [N, D] at an exit's depth -> tokens [N], and whether each leaves there [N] bool.
Ask = Callable[[Tensor], tuple[Tensor, Tensor]]
# States [N, D] at an exit's depth -> states [N, D] from which the next layer takes keys and values.
Substitute = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """`ids` [1, T], sequence after sequence. `may_leave` [T] bool: the positions that exits are asked about."""

    ids: Tensor
    sequences: Sequence[RaggedSequence]
    may_leave: Tensor


@dataclass(frozen=True)
class Outcome:
    """`states` [T, D] after the last layer, valid for tokens that stayed. `depths` [T]: layers run for each token. `tokens` [T]: what
    the exit proposes for a token that left, -1 for the others."""

    states: Tensor
    depths: Tensor
    tokens: Tensor


class Policy(Protocol):
    """Which layers run for which token."""

    def run(self, runner: ContiguousRunner, batch: Batch) -> Outcome: ...


@dataclass(frozen=True)
class Uniform:
    """Only the layers `kept`, ascending, run for all tokens. `patch`: maps states [N, D] where the first gap is."""

    kept: Sequence[int]
    patch: Substitute | None = None

    def run(self, runner: ContiguousRunner, batch: Batch) -> Outcome:
        hidden: Tensor | None = None
        for _, group in groupby(enumerate(self.kept), lambda item: item[1] - item[0]):
            layers = [layer for _, layer in group]
            if hidden is not None and self.patch is not None:
                hidden = self.patch(hidden[0])[None]
            hidden = runner.run_ragged(
                batch.ids, batch.sequences, first=layers[0], last=layers[-1] + 1, hidden=hidden
            )
        assert hidden is not None
        num_tokens = hidden.shape[1]
        return Outcome(
            hidden[0], torch.full((num_tokens,), len(self.kept)), torch.full((num_tokens,), -1)
        )


@dataclass(frozen=True)
class Skip:
    """A token that leaves at one of the `exits` (by depth) goes no deeper.

    Layer l takes its keys and values from `substitutes[d, l]` of the state at which it left; from the state of the last token before
    it that went through all layers if `substitutes` is None. To be simple, a pass runs the deeper layers over these states too and
    discards what comes out; `Outcome.depths` has the layers that a token needs.
    """

    exits: Mapping[int, Ask]
    substitutes: Mapping[tuple[int, int], Substitute] | None

    def run(self, runner: ContiguousRunner, batch: Batch) -> Outcome:
        num_layers, num_tokens = runner.num_layers, batch.ids.shape[1]
        depths = torch.full((num_tokens,), num_layers)
        tokens = torch.full((num_tokens,), -1)
        left: dict[int, Tensor] = {}
        hidden, first = None, 0
        for last in range(min(self.exits), num_layers + 1):
            hidden = runner.run_ragged(
                batch.ids, batch.sequences, first=first, last=last, hidden=hidden
            )
            first = last
            if last in self.exits:
                asked = (batch.may_leave & (depths == num_layers)).nonzero()[:, 0]
                proposed, leaves = self.exits[last](hidden[0, asked])
                depths[asked[leaves]], tokens[asked[leaves]] = last, proposed[leaves]
                left[last] = hidden[0].clone()
            if last < num_layers:
                hidden = self._substituted(last, hidden[0], depths, left)[None]
        assert hidden is not None
        return Outcome(hidden[0], depths, tokens)

    def _substituted(
        self, layer: int, states: Tensor, depths: Tensor, left: Mapping[int, Tensor]
    ) -> Tensor:
        """The states [T, D] that enter `layer`, with those of tokens that left replaced."""
        gone = depths < layer
        if self.substitutes is None:
            # Position 0 of a sequence is part of its prompt, so a token before it never belongs to another sequence.
            before = torch.where(gone, 0, torch.arange(len(depths))).cummax(0).values
            return states[before]
        states = states.clone()
        for depth, own in left.items():
            rows = depths == depth
            if depth < layer and rows.any():
                states[rows] = self.substitutes[depth, layer](own[rows])
        return states
