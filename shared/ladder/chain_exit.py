"""Steps of an exit that continues chains of drafts on its own output, and the exit that takes one step per call."""

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from shared.ladder.confidence_head import ConfidenceHead
from shared.ladder.draws import Draws, KernelDraws, PlainDraws, is_supported, kernel_weight
from shared.ladder.exit_head import ExitHead, chained, further_output, head_output, in_slots
from shared.ladder.head_rows import Matmul
from shared.ops.chains import Chains, ChainStart


class ChainSteps:
    """The steps of one exit. The block's matrices are held in 16 bits.

    `rows` [Vd, W] and `bias` [Vd] are the LM head's of the draft vocabulary. `num_chains`: the most chains of a call
    that is recorded.
    """

    def __init__(
        self,
        head: ExitHead,
        confidence: ConfidenceHead,
        rows: Tensor,
        bias: Tensor | None,
        num_chains: int = 1,
    ) -> None:
        self._head = head
        self._draws: Draws
        if is_supported(rows.device, len(rows)):
            self._draws = KernelDraws(confidence, rows, bias, num_chains)
        else:
            self._draws = PlainDraws(confidence, Matmul(rows, bias))
        self._matrices = [Matmul(kernel_weight(matrix)) for matrix in head.matrices]
        self._next = Matmul(kernel_weight(head.steps[1]))

    def with_confidence(self, confidence: ConfidenceHead) -> Self:
        """As `Draws.with_confidence`."""
        other = copy.copy(self)
        other._draws = self._draws.with_confidence(confidence)
        return other

    def held(self) -> list[Tensor | None]:
        """As `Draws.held`."""
        own = (tensor for matmul in (*self._matrices, self._next) for tensor in matmul.held())
        return [*self._head.parameters(), *self._draws.held(), *own]

    def output(self, states: Tensor, entering: Tensor) -> Tensor:
        """The outputs [N, D] of `step` alone, for tokens that another proposer has drafted."""
        return head_output(states, entering, self._head.norm, *self._matrices)

    def step(self, states: Tensor, entering: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One more token for each of N chains: indices into the draft vocabulary [N], probabilities [N] and outputs
        [N, D].

        `states` [N, 3, D] and `entering` [N, D]: as `ExitHead.forward` takes them. `places` [N] int64 >= 1: the place
        of the drafted token in its chain.
        """
        return self._drawn(self.output(states, entering), places)

    def further_step(self, previous: Tensor, entering: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`step` of chains that all go on from an output, `previous` [N, D]: without the matrix of first steps."""
        return self._drawn(further_output(previous, entering, self._head.norm, self._next, *self._matrices[1:]), places)

    def _drawn(self, output: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *self._draws(self._head.adapted(output), places), output


class SteppedChain:
    """An exit that makes one draft per call, from states that the model's layers have computed.

    `vocabulary` [Vd] int64: the tokens that it may draft.
    """

    reads_states = True

    def __init__(self, steps: ChainSteps, vocabulary: Tensor) -> None:
        self._steps, self._vocabulary = steps, vocabulary

    def with_confidence(self, confidence: ConfidenceHead) -> Self:
        """As `ExitProposer.with_confidence`."""
        return type(self)(self._steps.with_confidence(confidence), self._vocabulary)

    def held(self) -> list[Tensor | None]:
        """As `ExitProposer.held`."""
        return [*self._steps.held(), self._vocabulary]

    def propose(self, starts: Sequence[ChainStart]) -> Chains:
        """As `ExitProposer.propose`, with one draft of each chain.
        The drafts are read back in one device synchronisation."""
        states = list(slots_of(starts))
        entering = [start.entering for start in starts if start.entering is not None]
        place = 0
        while late := [i for i, start in enumerate(starts) if place + 1 < len(start.tokens)]:
            outputs = self._steps.output(
                torch.stack([states[i] for i in late]), torch.stack([entering[i][place] for i in late])
            )
            for i, output in zip(late, outputs, strict=True):
                states[i] = chained(output)
            place += 1
        places = [start.place + len(start.tokens) for start in starts]
        choices, probabilities, outputs = self._steps.step(
            torch.stack(states),
            torch.stack([of_start[-1] for of_start in entering]),
            torch.tensor(places, device=self._vocabulary.device),
        )
        # Tokens are whole numbers that float64 holds, so that the device is read once.
        tokens, read = torch.stack([self._vocabulary[choices].double(), probabilities.double()]).cpu()[..., None]
        return Chains(tokens.long(), read.contiguous(), torch.ones(len(starts), dtype=torch.int64), outputs[:, None])


def slots_of(starts: Sequence[ChainStart]) -> Tensor:
    """What the head reads [N, NUM_SLOTS, D] to go on with each chain."""
    begins = [start.begin for start in starts if start.begin is not None]
    # Mostly all of them are of one kind, and few copies serve all.
    if all(start.has_begun for start in starts):
        return chained(torch.stack(begins))
    if not any(start.has_begun for start in starts):
        return in_slots(torch.stack(begins).float())
    return torch.stack([chained(begin) if begin.dim() == 1 else in_slots(begin.float()) for begin in begins])
