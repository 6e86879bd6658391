"""An exit head at depth 0 that drafts whole chains as one recorded piece of work, without Python between the drafts.
For GPUs.

A recording has fixed shapes, so there is one for each of a few numbers of chains, and a call makes a fixed number of
drafts. Rows without a chain compute numbers that nobody reads. The stop rule is applied to what is read back: waiting
for the device after each draft would take longer than making drafts that are dropped. What a head is fed before is few
tokens mostly, and launched as it is.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from shared.ladder.chain_exit import ChainSteps, slots_of
from shared.ladder.confidence_head import HIGHEST, ConfidenceHead
from shared.ladder.exit_head import NUM_SLOTS, chained
from shared.model.inference import inference
from shared.model.paged_head import bucket_of
from shared.model.recorder import Work
from shared.model.runner import Runner
from shared.ops.chains import Chains, ChainStart, chain_lengths

# Chains of one recording, and the drafts of each. Always as many: a call costs what was measured, whatever room its
# chains have.
NUM_CHAINS, NUM_DRAFTS = (1, 4, 16, 64), 4
MAX_CHAINS = NUM_CHAINS[-1]
# Chains of any recording of these steps, also elsewhere.
MAX_RECORDED = 256


class RecordedChain:
    """`steps`: the exit's, whose head reads states of `hidden_size`; `vocabulary` [Vd] int64: the tokens that it may
    draft.

    States at depth 0 must be rows of the runner's embedding.
    """

    reads_states = False

    def __init__(self, steps: ChainSteps, vocabulary: Tensor, hidden_size: int, runner: Runner) -> None:
        self.steps, self.vocabulary, self._runner = steps, vocabulary, runner
        self._recorded: dict[int, Work] = {}
        device = vocabulary.device
        with torch.inference_mode():
            # What a recording reads: the states behind all tokens of a chain but the newest one, that one, and the
            # place after it.
            self._states = torch.zeros(MAX_CHAINS, NUM_SLOTS, hidden_size, device=device)
            self._newest = torch.ones(2, MAX_CHAINS, dtype=torch.int64, device=device)
            # What it writes. Tokens are whole numbers that float64 holds, so that the device is read once.
            self._drafted = {
                size: torch.zeros(2, size, NUM_DRAFTS, dtype=torch.float64, device=device) for size in NUM_CHAINS
            }
            self._outputs = torch.zeros(MAX_CHAINS, NUM_DRAFTS, hidden_size, device=device)

    def with_confidence(self, confidence: ConfidenceHead) -> Self:
        """As `ExitProposer.with_confidence`."""
        hidden_size = self._states.shape[-1]
        return type(self)(self.steps.with_confidence(confidence), self.vocabulary, hidden_size, self._runner)

    def held(self) -> list[Tensor | None]:
        """As `ExitProposer.held`."""
        own = (self.vocabulary, self._states, self._newest, self._outputs, *self._drafted.values())
        return [*self.steps.held(), *own]

    def prepare(self) -> Iterator[None]:
        """Records everything that `propose` replays. Yields between recordings."""
        for size in NUM_CHAINS:
            self._recorded_for(size)
            yield

    def propose(self, starts: Sequence[ChainStart]) -> Chains:
        """As `ExitProposer.propose`, with at most NUM_DRAFTS drafts of each chain.
        Waits for the device once per MAX_CHAINS chains."""
        parts = [self._propose(starts[first : first + MAX_CHAINS]) for first in range(0, len(starts), MAX_CHAINS)]
        return parts[0] if len(parts) == 1 else Chains(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def _propose(self, starts: Sequence[ChainStart]) -> Chains:
        count = len(starts)
        size = bucket_of(count, NUM_CHAINS)
        work = self._recorded_for(size)  # at first use this runs the work
        self._states[:count].copy_(self._fed(starts))
        newest = [[start.tokens[-1] for start in starts], [start.place + len(start.tokens) for start in starts]]
        # From pageable memory: the driver has copied it when the call returns.
        self._newest[:, :count].copy_(torch.tensor(newest), non_blocking=True)
        work()
        tokens, probabilities = self._drafted[size].cpu()[:, :count]
        lengths = chain_lengths(starts, probabilities, HIGHEST)
        return Chains(tokens.long(), probabilities.clone(), lengths, self._outputs[:count].clone())

    def _fed(self, starts: Sequence[ChainStart]) -> Tensor:
        """The states [N, NUM_SLOTS, D] behind all tokens of each chain but the newest one."""
        states, most = slots_of(starts), max(len(start.tokens) for start in starts)
        if most > 1:
            # They end together: a chain with fewer tokens than others is fed later, and before it nothing (-1).
            listed = [[-1] * (most - len(start.tokens)) + [*start.tokens[:-1]] for start in starts]
            for tokens in torch.tensor(listed).to(states.device, non_blocking=True).unbind(1):
                output = self.steps.output(states, self._entering(tokens.clamp_min(0)))
                states = torch.where((tokens >= 0)[:, None, None], chained(output), states)
        return states

    def _recorded_for(self, size: int) -> Work:
        """The work of `_step`. Recorded at first use."""
        if size not in self._recorded:
            self._recorded[size] = self._runner.record(partial(self._step, size))
        return self._recorded[size]

    @inference
    def _step(self, size: int) -> None:
        """NUM_DRAFTS drafts of each chain after its newest token."""
        newest, places = self._newest[:, :size]
        previous, outputs = self._states[:size], self._outputs[:size]
        for step in range(NUM_DRAFTS):
            go_on = self.steps.further_step if step else self.steps.step
            choices, probabilities, previous = go_on(previous, self._entering(newest), places + step)
            newest = self.vocabulary[choices]
            self._drafted[size][0, :, step].copy_(newest)
            self._drafted[size][1, :, step].copy_(probabilities)
            outputs[:, step].copy_(previous)

    def _entering(self, tokens: Tensor) -> Tensor:
        return self._runner.embed(tokens[None])[0]
