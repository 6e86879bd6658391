"""What a step replays for requests on the device: their drafts, and what the full model makes of them."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from shared.engine.ahead.slots import SlotMemory
from shared.engine.drafting.drafter import Drafter
from shared.ladder.exit_head import in_slots
from shared.ladder.ladder import BoundLadder
from shared.ladder.learned_ngrams import LearnedNgrams
from shared.ladder.recorded_chain import NUM_DRAFTS
from shared.model.inference import inference
from shared.model.paged_head import bucket_of
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import Work
from shared.model.runner import captured_depths
from shared.ops import slots
from shared.ops.slots import MOST_ROWS, PLACES, changed_entries, learned_entries

# Requests of one recording.
ROW_SIZES = (1, 4, 16, 64, 128)
# Those of a step under way and those of the next one have slots together.
MAX_ROWS = ROW_SIZES[-1]
assert 2 * MAX_ROWS <= MOST_ROWS
# Entries of a learned table that are sent one by one. Beyond that the whole table is.
MAX_CHANGED = 1 << 16


class LearnedMirror:
    """A table that learns from answers, as it is on the device: `entries` [N, 16] uint8."""

    @inference
    def __init__(self, table: LearnedNgrams, device: torch.device) -> None:
        self._handle = table.handle
        changed_entries(self._handle, MAX_CHANGED)  # from here on changes are noted
        self._host = learned_entries(self._handle)
        self.entries = self._host.clone().to(device)

    @inference
    def update(self) -> None:
        """Sends what has changed."""
        changed = changed_entries(self._handle, MAX_CHANGED)
        if changed is None:
            self.entries.copy_(self._host)
        elif changed:
            numbers = torch.tensor(changed)
            device = self.entries.device
            sent = self._host.index_select(0, numbers).to(device, non_blocking=True)
            self.entries.index_copy_(0, numbers.to(device, non_blocking=True), sent)


class DraftGraphs:
    """The drafts of one bound ladder: recorded once for each of ROW_SIZES. Tables draft PLACES tokens of a chain; the
    head, which sees the tokens that were chosen, drafts the first NUM_DRAFTS of them.

    `number`: the ladder's. `seconds`: what drafting for so many requests takes.
    """

    @inference
    def __init__(
        self, number: int, drafter: Drafter, memory: SlotMemory, runner: PagedRunner, learned: LearnedMirror | None
    ) -> None:
        self.number = number
        self._memory, self._runner = memory, runner
        bound = drafter.ladder
        assert bound is not None
        device = runner.loaded.device
        columns = bound.tables_on(device)
        entries = learned.entries if learned else None
        make = partial(slots.proposers, drafter.native, number, columns, entries)
        self._tables = make()
        self._chain = chain = bound.chain_at_start
        self._with_head = make((memory.exit_tokens, memory.exit_probabilities)) if chain else self._tables
        self._places = torch.ones(MAX_ROWS, dtype=torch.int64, device=device)
        self._recorded: dict[int, Work] = {}
        self.seconds: dict[int, float] = {}

    def prepare(self, seconds: Callable[[Work], float]) -> Iterator[None]:
        """Records all sizes, and has them timed. Yields between them."""

        def drafted(size: int) -> None:
            self.replay(size)
            self._memory.newest[:1].tolist()  # waits

        for size in ROW_SIZES:
            self.replay(size)
            yield
            with self._memory.trial(size, self.number):
                self.seconds[size] = seconds(partial(drafted, size))
            yield

    def replay(self, num_rows: int) -> None:
        size = bucket_of(num_rows, ROW_SIZES)
        if size not in self._recorded:
            self._recorded[size] = self._runner.record(partial(self._draft, size))
        self._recorded[size]()

    def seconds_of(self, num_rows: int) -> float:
        return self.seconds.get(bucket_of(num_rows, ROW_SIZES), 0.0)

    @inference
    def _draft(self, size: int) -> None:
        memory, args = self._memory, self._memory.args[self._runner.pass_sizes[0]]
        slots.begin(memory.rows, args, self.number)
        output: Tensor | None = None
        for place in range(PLACES):
            has_head = self._chain is not None and place < NUM_DRAFTS
            if has_head:
                output = self._head(size, place, output)
            slots.draft(memory.rows, args, self._with_head if has_head else self._tables, size, place)

    def _head(self, size: int, place: int, previous: Tensor | None) -> Tensor:
        """What the head drafts after the newest token of each chain. Returns its outputs [size, D]."""
        assert self._chain is not None
        memory, steps = self._memory, self._chain.steps
        entering = self._runner.embed(memory.newest[None, :size])[0]
        places = self._places[:size] + place
        if previous is None:
            begun = memory.states.index_select(0, memory.state_slots[:size])
            choices, probabilities, output = steps.step(in_slots(begun.float()), entering, places)
        else:
            choices, probabilities, output = steps.further_step(previous, entering, places)
        memory.exit_tokens[:size].copy_(self._chain.vocabulary[choices])
        memory.exit_probabilities[:size].copy_(probabilities)
        return output


class StepGraphs:
    """What all steps of one runner replay. `learned`: the table that learns from answers, if there is one."""

    def __init__(self, runner: PagedRunner, learned: LearnedNgrams | None) -> None:
        self.memory = SlotMemory(runner)
        self._runner = runner
        self.learned = LearnedMirror(learned, runner.loaded.device) if learned else None
        self._accepting: dict[tuple[int, bool], Work] = {}
        self._drafting: weakref.WeakKeyDictionary[BoundLadder, DraftGraphs] = weakref.WeakKeyDictionary()
        self._num_ladders = 0
        self._depths = (*captured_depths(runner.num_layers), runner.num_layers)

    def drafts_of(self, drafter: Drafter) -> DraftGraphs:
        """Those of a drafter with a ladder, which it shares with others of the same."""
        assert drafter.ladder is not None
        found = self._drafting.get(drafter.ladder)
        if found is None:
            found = DraftGraphs(self._num_ladders, drafter, self.memory, self._runner, self.learned)
            self._drafting[drafter.ladder] = found
            self._num_ladders += 1
        return found

    def prepare(self) -> Iterator[None]:
        """Records what all steps need. Yields between recordings."""
        # To record work is to do it, and nothing may be accepted twice.
        self.memory.send((), (), 0)
        for size in self._runner.head_sizes:
            for draws in (False, True):
                self._accepting[size, draws] = self._runner.record(partial(self._accept, size, draws))
                yield

    def run(self, size: int, num_logits: int, *, draws: bool) -> None:
        """Plans the pass of `size` tokens, runs it, and accepts what the full model chooses at no more than
        `num_logits` of them, if there are any. `draws`: whether some of these tokens are drawn."""
        memory = self.memory
        run_layers = self._runner.recorded_pass(size)
        slots.plan(memory.rows, memory.args[size])
        run_layers()
        if num_logits:
            self._accepting[bucket_of(num_logits, self._runner.head_sizes), draws]()

    @inference
    def _accept(self, num_logits: int, draws: bool) -> None:
        memory, runner = self.memory, self._runner
        drawing = memory.drawing[:, :num_logits] if draws else None
        memory.chosen[:num_logits].copy_(runner.choose_rows(memory.logit_rows[:num_logits], drawing))
        slots.accept(memory.rows, memory.args[runner.pass_sizes[0]])
        # A request has at least one of these rows.
        rows, into = memory.state_rows[:num_logits], memory.state_slots[:num_logits]
        for place, depth in enumerate(self._depths):
            memory.states[:, place].index_copy_(0, into, runner.left_at(depth).index_select(0, rows))
