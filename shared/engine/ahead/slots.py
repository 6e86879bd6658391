"""Requests that live on the device: their tokens, lengths, states and ends; what a step reads and writes of them."""

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, memmove, memset
from ctypes import sizeof as size_of
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared.ladder.exit_head import NUM_STATES
from shared.model.inference import inference
from shared.model.paged_runner import PagedRunner
from shared.ops.slots import (
    MOST_ROWS,
    NO_DRAFTER,
    PLACES,
    Control,
    Slot,
    SlotArgs,
    correction_bytes,
    row_bytes,
    write_corrections,
)

# Steps under way at once, so that what the host has sent or reads is not overwritten.
NUM_STEPS = 2
# Sizes of each request while drafting is timed. Look-up reads all tokens of a request at each place.
TRIAL_TOKENS, TRIAL_VOCABULARY = 1024, 16
# Waits for what was read, and returns the address of the first row.
Arrived = Callable[[], int]


class RowOfStep(NamedTuple):
    """A request in a step: its slot, its block table, its drafter by number, and the address of what is known of drafts
    for its kind; 0: nothing."""

    slot: int
    table: int
    drafter: int
    confidence: int


class SlotMemory:
    """MOST_ROWS slots and one that is spare, for one runner.

    `rows` [MOST_ROWS, bytes] uint8: what became of each request in the last step. `newest`, `logit_rows`, `chosen`,
    `state_rows`, `state_slots` [MOST_ROWS] int64 and `drawing` [3, MOST_ROWS] float64: see csrc/draft/slots.h. `states`
    [MOST_ROWS + 1, NUM_STATES, D]: of the last settled token of each slot. `exit_tokens` int64 and `exit_probabilities`
    float32 [MOST_ROWS]: what a head drafts. `args`: where all this lies, for each size of a pass.
    """

    @inference
    def __init__(self, runner: PagedRunner) -> None:
        device = runner.loaded.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._slots = zeros(MOST_ROWS + 1, size_of(Slot), dtype=torch.uint8)
        self._tokens = zeros(MOST_ROWS + 1, runner.loaded.context_length + PLACES + 1, dtype=torch.int32)
        self.rows = zeros(MOST_ROWS, row_bytes(), dtype=torch.uint8)
        num_bytes = size_of(Control) + MOST_ROWS * correction_bytes()
        self._control = zeros(num_bytes, dtype=torch.uint8)
        self.newest, self.logit_rows, self.chosen, self.state_rows, self.state_slots = zeros(5, MOST_ROWS).unbind()
        self.drawing = zeros(3, MOST_ROWS, dtype=torch.float64)
        self.states = zeros(MOST_ROWS + 1, NUM_STATES, runner.loaded.hidden_size, dtype=runner.loaded.model.dtype)
        self.exit_tokens, self.exit_probabilities = zeros(MOST_ROWS), zeros(MOST_ROWS, dtype=torch.float32)
        self.args = {size: self._args(runner.token_buffer(size).stacked) for size in runner.pass_sizes}
        # What the host writes and reads while the device copies it.
        is_cuda = device.type == "cuda"
        self._sent = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(NUM_STEPS)]
        self._read = [torch.zeros(self.rows.shape, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(NUM_STEPS)]
        self._events = [torch.cuda.Event() for _ in range(NUM_STEPS)] if is_cuda else []
        self._num_sent = self._num_read = 0
        # The rows that were sent last, and as they are written: in each of `_sent`, which has the rows of `_written`.
        self._rows: Sequence[RowOfStep] | None = None
        self._columns = [array("i")] * 4
        self._confidences = array("Q")
        self._controls = [Control.from_address(each.data_ptr()) for each in self._sent]
        self._written: list[Sequence[RowOfStep] | None] = [None] * NUM_STEPS
        self._correction_bytes = correction_bytes()
        self._views: dict[tuple[bool, int, int], tuple[Tensor, Tensor]] = {}

    def _args(self, token_rows: Tensor) -> SlotArgs:
        pointers = {
            "control": self._control,
            "slots": self._slots,
            "tokens": self._tokens,
            "rows": self.rows,
            "newest": self.newest,
            "token_rows": token_rows,
            "logit_rows": self.logit_rows,
            "drawing": self.drawing,
            "chosen": self.chosen,
            "state_rows": self.state_rows,
            "state_slots": self.state_slots,
        }
        addresses = {name: tensor.data_ptr() for name, tensor in pointers.items()}
        return SlotArgs(width=self._tokens.shape[1], spare_slot=MOST_ROWS, **addresses)

    @inference
    def fill(self, number: int, slot: Slot, tokens: Sequence[int], states: Tensor | None) -> None:
        """Puts a request into a slot. `states` [NUM_STATES, D]: of its last settled token, if they are known."""
        slot.has_states = states is not None
        # From pageable memory: the driver has copied it when the call returns.
        self._copy(self._slots[number], torch.frombuffer(bytearray(slot), dtype=torch.uint8))
        self._copy(self._tokens[number, : len(tokens)], torch.tensor(tokens, dtype=torch.int32))
        if states is not None:
            self.states[number].copy_(states)

    @contextmanager
    def trial(self, num_rows: int, drafter: int) -> Iterator[None]:
        """Within it, a step has so many requests of a drafter, each with TRIAL_TOKENS tokens in which many contexts
        come again: for the time that drafting takes. They share the spare slot, and get no tokens."""
        width = min(TRIAL_TOKENS, self._tokens.shape[1] - PLACES - 1)
        tokens = random.Random(0).choices(range(TRIAL_VOCABULARY), k=width)
        slot = Slot(num_tokens=width, num_left=PLACES + 1, is_open=1)
        self.fill(MOST_ROWS, slot, tokens, torch.zeros_like(self.states[MOST_ROWS]))
        self.send([RowOfStep(MOST_ROWS, 0, drafter, 0)] * num_rows, (), 0)
        try:
            yield
        finally:
            self.fill(MOST_ROWS, Slot(), (), None)
            self.send((), (), 0)

    @inference
    def send(
        self, rows: Sequence[RowOfStep], others: Sequence[tuple[int, int, int]], size: int, *, drafts: bool = True
    ) -> None:
        """Tells the device what the next step has: `rows`, the tokens of prompts with their block tables and positions,
        the size of its pass, and whether anything is drafted. One copy."""
        place = self._num_sent % NUM_STEPS
        memory, control = self._sent[place], self._controls[place]
        self._num_sent += 1
        control.num_rows, control.num_others, control.num_tokens = len(rows), len(others), size
        if rows is not self._rows:
            *columns, confidences = zip(*rows, strict=True) if rows else ((), (), (), ())
            kinds = {address: kind for kind, address in enumerate(dict.fromkeys(confidences))}
            self._columns = [array("i", numbers) for numbers in (*columns, map(kinds.__getitem__, confidences))]
            self._confidences, self._rows = array("Q", kinds), rows
        if self._written[place] is not rows or not drafts:
            _write((control.slots, control.tables, control.drafters, control.kinds), self._columns)
            self._written[place] = rows if drafts else None
        if others:
            _write(control.others, [array("i", numbers) for numbers in zip(*others, strict=True)])
        if not drafts:
            memset(addressof(control.drafters), NO_DRAFTER, 4 * len(rows))
        write_corrections(self._confidences, memory.data_ptr() + size_of(Control))
        num_bytes = size_of(Control) + len(self._confidences) * self._correction_bytes
        self._copy(*self._view(self._control, memory, place, num_bytes))

    @inference
    def read(self, num_rows: int) -> Arrived:
        """Has the rows copied to the host once the device is done with the step. One copy."""
        place = self._num_read % NUM_STEPS
        self._num_read += 1
        memory = self._read[place]
        self._copy(*self._view(memory, self.rows, place, num_rows))
        for event in self._events[place : place + 1]:
            event.record(torch.cuda.current_stream(self.rows.device))

        def arrived() -> int:
            self._wait(place)
            return memory.data_ptr()

        return arrived

    def _view(self, into: Tensor, source: Tensor, place: int, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` of both, which are made once."""
        key = into is self._control, place, count
        if key not in self._views:
            self._views[key] = into[:count], source[:count]
        return self._views[key]

    def _copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def _wait(self, place: int) -> None:
        for event in self._events[place : place + 1]:
            event.synchronize()


def _write(columns: Iterable[Any], numbers: Iterable["array[int]"]) -> None:
    for column, listed in zip(columns, numbers, strict=True):
        memmove(addressof(column), listed.buffer_info()[0], 4 * len(listed))
