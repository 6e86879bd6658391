"""An exit head at depth 0 that drafts whole chains as recorded work, without Python between the drafts. For GPUs.

A recording has fixed shapes, so there is one for each of a few numbers of chains, and a call makes a fixed number of
drafts. Rows without a chain compute numbers that nobody reads. The stop rule is applied to what is read back: waiting
for the device after each draft would take longer than making drafts that are dropped.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from shared.ladder.chain_exit import ChainSteps, slots_of
from shared.ladder.confidence_head import HIGHEST
from shared.ladder.exit_head import NUM_SLOTS, chained
from shared.model.inference import inference
from shared.model.recorder import Work
from shared.model.runner import Runner
from shared.ops.chains import Chains, ChainStart, chain_lengths

# Chains of one recording, and the drafts of each. Always as many: a call costs what was measured, whatever room its
# chains have.
NUM_CHAINS, NUM_DRAFTS = (1, 4, 16, 64), 4
MAX_CHAINS = NUM_CHAINS[-1]


class RecordedChain:
    """`steps`: the exit's, whose head reads states of `hidden_size`; `vocabulary` [Vd] int64: the tokens that it may
    draft.

    States at depth 0 must be rows of the runner's embedding.
    """

    reads_states = False

    def __init__(self, steps: ChainSteps, vocabulary: Tensor, hidden_size: int, runner: Runner) -> None:
        self._steps, self._vocabulary, self._runner = steps, vocabulary, runner
        self._recorded: dict[int, tuple[Work, Work]] = {}
        device = vocabulary.device
        with torch.inference_mode():
            # What a recording reads: the states behind each newest token, that token, and the place of the token to be
            # drafted.
            self._states = torch.zeros(MAX_CHAINS, NUM_SLOTS, hidden_size, device=device)
            self._newest = torch.zeros(MAX_CHAINS, dtype=torch.int64, device=device)
            self._places = torch.ones(MAX_CHAINS, dtype=torch.int64, device=device)
            self._is_fed = torch.zeros(MAX_CHAINS, dtype=torch.bool, device=device)
            # What it writes.
            self._drafted = torch.zeros(NUM_DRAFTS, MAX_CHAINS, dtype=torch.int64, device=device)
            self._probabilities = torch.zeros(NUM_DRAFTS, MAX_CHAINS, device=device)
            self._outputs = torch.zeros(NUM_DRAFTS, MAX_CHAINS, hidden_size, device=device)

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
        # Before the tensors are filled: recording runs the work.
        feed, step = self._recorded_for(next(size for size in NUM_CHAINS if size >= count))
        self._states[:count].copy_(slots_of(starts))
        # The last column holds all newest tokens. A sequence with fewer tokens than others enters the columns later.
        width = max(len(start.tokens) for start in starts)
        columns = [[-1] * (width - len(start.tokens)) + list(start.tokens) for start in starts]
        places = [[start.place + len(start.tokens)] for start in starts]
        sent = torch.tensor([c + p for c, p in zip(columns, places, strict=True)])
        # From pageable memory: the driver has copied it when the call returns.
        *fed, newest, place = sent.to(self._newest.device, non_blocking=True).unbind(1)
        for column in fed:
            self._is_fed[:count].copy_(column >= 0)
            self._newest[:count].copy_(column.clamp_min(0))
            feed()
        self._newest[:count].copy_(newest)
        self._places[:count].copy_(place)
        step()
        # Tokens are whole numbers that float64 holds, so that the device is read once.
        read = torch.stack([self._drafted[:, :count].double(), self._probabilities[:, :count].double()])
        tokens, probabilities = read.transpose(1, 2).contiguous().cpu()
        lengths = chain_lengths(starts, probabilities, HIGHEST)
        return Chains(tokens.long(), probabilities, lengths, self._outputs[:, :count].transpose(0, 1).clone())

    def _recorded_for(self, size: int) -> tuple[Work, Work]:
        """For `size` chains: the work of `_feed` and that of `_step`. Recorded at first use."""
        if size not in self._recorded:
            feed, step = partial(self._feed, size), partial(self._step, size)
            self._recorded[size] = self._runner.record(feed), self._runner.record(step)
        return self._recorded[size]

    @inference
    def _feed(self, size: int) -> None:
        """The head sees the newest tokens of the chains that are fed; the states of the others stay."""
        states, is_fed = self._states[:size], self._is_fed[:size, None, None]
        output = self._steps.output(states, self._entering(self._newest[:size]))
        states.copy_(torch.where(is_fed, chained(output), states))

    @inference
    def _step(self, size: int) -> None:
        """NUM_DRAFTS drafts after the newest tokens."""
        previous, newest = self._states[:size], self._newest[:size]
        for step in range(NUM_DRAFTS):
            places = self._places[:size] + step
            go_on = self._steps.further_step if step else self._steps.step
            choices, probabilities, previous = go_on(previous, self._entering(newest), places)
            newest = self._vocabulary[choices]
            self._drafted[step, :size].copy_(newest)
            self._probabilities[step, :size].copy_(probabilities)
            self._outputs[step, :size].copy_(previous)

    def _entering(self, tokens: Tensor) -> Tensor:
        return self._runner.embed(tokens[None])[0]
