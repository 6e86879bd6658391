"""Tokens taken from exit to exit of a ladder until one is sure enough, in recorded stages between which the host computes nothing.

Stage k takes its tokens through the layers up to exit k, asks head, draft vocabulary and router, and parts them: those whose
probability reaches their threshold leave; the others are gathered to the front, and are the tokens of stage k + 1. Where the
runner composes recordings, all stages are one launch: the device itself ends the walk when nobody is left, and the host reads
once, at the end. Elsewhere the host reads after each stage what it has said and how many stay, and picks the next one's size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from shared.ladder.fused_exit import FusedExit
from shared.ladder.rungs import Draft, exit_name
from shared.model.paged_kv import PagedCache
from shared.model.paged_pass import PassTokens
from shared.model.paged_runner import PagedRunner, bucket_of
from shared.model.recorder import Work
from shared.ops.batches import gather_rows, scatter_rows
from shared.ops.exits import new_tickets

# Tokens of a stage. The smallest is the runner's: see there.
BUCKETS = (16, 32, 64)
# What is told of each token, by column. Of nobody all is 0, hence the position comes plus one.
ID, POSITION, ROW, AGO, PLACE = range(5)
NOBODY = -1


@dataclass(frozen=True)
class Walker:
    """A token that no layer has run for, at `position` of `cache`; all before it have been as deep as it may go.

    `deep_state` [D] of the last settled token of its sequence at depth L, `offset` >= 1: how many positions lie between the two.
    It leaves at the first exit whose probability reaches that of `thresholds`, one per exit.
    """

    token: int
    cache: PagedCache
    position: int
    deep_state: Tensor
    offset: int
    thresholds: tuple[float, ...]


@dataclass(frozen=True)
class Walked:
    """What the exits said that a token passed, shallowest first, and its state [D] at the last of them."""

    drafts: tuple[Draft, ...]
    state: Tensor

    @property
    def depth(self) -> int:
        return self.drafts[-1].depth


class _Stage:
    """Layers [first, last) and the exit behind them, and where the stage leaves what the next one takes up."""

    def __init__(self, first: int, last: int, leaves: FusedExit, state: Tensor) -> None:
        self.first, self.last, self.exit = first, last, leaves
        device = state.device
        self.tickets = new_tickets(BUCKETS[-1], device)
        # The walkers' places, NOBODY's behind them; their states when leaving; those that stay, first.
        self.places = torch.full((BUCKETS[-1],), NOBODY, dtype=torch.int64, device=device)
        self.states = state.repeat(BUCKETS[-1], 1)
        self.order = torch.zeros(BUCKETS[-1], dtype=torch.int64, device=device)
        self.num_stays = torch.zeros(1, dtype=torch.int64, device=device)
        self.recordings: dict[int, Work] = {}


class ExitWalk:
    """Walks through all exits of one ladder, on kernels. One thread, the runner's. `vocabulary` [Vd] int64: of all drafts."""

    @torch.inference_mode()
    def __init__(
        self,
        runner: PagedRunner,
        depths: Sequence[int],
        exits: Sequence[FusedExit],
        vocabulary: Tensor,
    ) -> None:
        self._runner = runner
        self._depths = tuple(depths)
        self._vocabulary = vocabulary
        state = torch.zeros(
            1,
            runner.loaded.hidden_size,
            dtype=runner.loaded.model.dtype,
            device=runner.loaded.device,
        )
        self._stages = [
            _Stage(first, last, leaves, state)
            for (first, last), leaves in zip(pairwise((0, *depths)), exits, strict=True)
        ]
        self._composed: dict[int, Work] = {}
        device, size, count = state.device, BUCKETS[-1], len(depths)
        self._numbers = torch.zeros(size, 5, dtype=torch.int64, device=device)
        self._thresholds = torch.zeros(size, count, device=device)
        self._deep_states = state.repeat(size, 1)
        # By place: the state where a token left, and what each exit said, token and probability; the last row: how many stay.
        self._left = state.repeat(size, 1)
        self._said = torch.zeros(count, size + 1, 2, dtype=torch.float64, device=device)

    def prepare(self) -> Iterator[None]:
        """Records all there is to record; yields where other work may come between."""
        for bucket in BUCKETS:
            yield from self._record(bucket)

    @torch.inference_mode()
    def __call__(self, walkers: Sequence[Walker]) -> list[Walked]:
        """Walks of N tokens, in company of at most the largest bucket."""
        walked: list[Walked] = []
        for start in range(0, len(walkers), BUCKETS[-1]):
            walked += self._walk(walkers[start : start + BUCKETS[-1]])
        return walked

    def _walk(self, walkers: Sequence[Walker]) -> list[Walked]:
        count = len(walkers)
        bucket = bucket_of(count, BUCKETS)
        for _ in self._record(bucket):
            pass
        self._fill(walkers, bucket)
        if self._decided_on_device:
            self._composed[bucket]()
            said = self._said.tolist()
        else:
            said = []
            for index in range(len(self._stages)):
                self._stages[index].recordings[bucket]()
                said.append(self._said[index].tolist())
                num_stays = int(said[-1][-1][0])
                if not num_stays:
                    break
                bucket = bucket_of(num_stays, BUCKETS)
        num_walking = count
        for stage, answers in zip(self._stages, said, strict=False):
            if num_walking:
                self._runner.counters.add(stage.first, stage.last, num_walking)
            num_walking = int(answers[-1][0])
        states = self._left[:count].clone()
        return [
            Walked(self._drafts([answers[place] for answers in said]), state)
            for place, state in enumerate(states)
        ]

    def _drafts(self, answers: Sequence[Sequence[float]]) -> tuple[Draft, ...]:
        """Of one token's answers, (token, probability) by exit; a probability of 0 is none: routers never say it."""
        return tuple(
            Draft(int(token), probability, exit_name(depth), depth)
            for depth, (token, probability) in zip(self._depths, answers, strict=False)
            if probability
        )

    def _fill(self, walkers: Sequence[Walker], bucket: int) -> None:
        padding = bucket - len(walkers)
        rows = []
        for place, walker in enumerate(walkers):
            walker.cache.begin(walker.position, 1)
            row = self._runner.pool.row_of(walker.cache)
            rows.append([walker.token, walker.position + 1, row, walker.offset - 1, place])
        rows += [[0, 0, 0, 0, NOBODY]] * padding
        self._numbers[:bucket].copy_(torch.tensor(rows), non_blocking=True)
        thresholds = torch.tensor([walker.thresholds for walker in walkers])
        self._thresholds[: len(walkers)].copy_(thresholds, non_blocking=True)
        torch.stack(
            [walker.deep_state for walker in walkers], out=self._deep_states[: len(walkers)]
        )

    @property
    def _decided_on_device(self) -> bool:
        return self._runner.recorder.composes and len(self._stages) > 1

    @torch.inference_mode()
    def _record(self, bucket: int) -> Iterator[None]:
        """All that walks of up to `bucket` tokens may need: the later stages of fewer tokens, too."""
        for smaller in BUCKETS[: BUCKETS.index(bucket) + 1]:
            for index, stage in enumerate(self._stages):
                if smaller not in stage.recordings:
                    self._empty()
                    work = partial(self._run, index, smaller)
                    stage.recordings[smaller] = self._runner.recorder.record(work)
                    yield
        if self._decided_on_device and bucket not in self._composed:
            recordings = [stage.recordings[bucket] for stage in self._stages]
            counts = [stage.num_stays for stage in self._stages[:-1]]
            self._composed[bucket] = self._runner.recorder.compose(recordings, counts)
            yield

    @torch.inference_mode()
    def _empty(self) -> None:
        """Nobody walks, so that recording a stage writes to nobody's pages."""
        self._numbers[:, PLACE] = NOBODY
        for stage in self._stages:
            stage.num_stays.zero_()

    @torch.inference_mode()
    def _run(self, index: int, bucket: int) -> None:
        stage = self._stages[index]
        if index == 0:
            self._said.zero_()
            places, entering = self._numbers[:bucket, PLACE].contiguous(), None
        else:
            before = self._stages[index - 1]
            order, count = before.order[:bucket], before.num_stays
            # Rows behind the last that stays come out as 0.
            places = gather_rows(before.places[:, None] + 1, order, count)[:, 0] + NOBODY
            entering = gather_rows(before.states, order, count)
        told = gather_rows(self._numbers, places).T.contiguous()
        tokens = PassTokens(told[ID], told[POSITION] - 1, told[ROW])
        states = self._runner.part(
            tokens, entering if stage.first else None, stage.first, stage.last
        )
        decision = stage.exit.decide(
            states,
            gather_rows(self._deep_states, places),
            told[AGO],
            gather_rows(self._thresholds, places)[:, index].contiguous(),
            stage.tickets,
        )
        stage.places[:bucket].copy_(places)
        stage.states[:bucket].copy_(states)
        stage.order[:bucket].copy_(decision.order)
        stage.num_stays.copy_(decision.num_stays)
        scatter_rows(self._left, states, places)
        tokens_said = self._vocabulary.index_select(0, decision.places)
        answers = torch.stack([tokens_said.double(), decision.probabilities.double()], -1)
        scatter_rows(self._said[index], answers, places)
        self._said[index, -1, 0].copy_(decision.num_stays[0])
