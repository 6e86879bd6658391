"""The native side of requests that live on the device: what csrc/draft/slots.h says of slots, rows and steps."""

from array import array
from collections.abc import Iterator, Sequence
from ctypes import Structure, addressof, byref, c_double, c_int32, c_int64, c_uint64, c_void_p
from ctypes import sizeof as size_of
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared import ops
from shared.ops.drafting import Handle, functions

PLACES, MOST_ENDS, MOST_ROWS = 8, 8, 256
# Proposers that draft on the device: tables and one exit.
NUM_PROPOSERS = 6
# A row without drafts.
NO_DRAFTER = -1


class Slot(Structure):
    """A request between steps: see `Slot` there."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_left", c_int64),
        ("salt", c_uint64),
        ("is_open", c_int32),
        ("has_states", c_int32),
        ("num_ends", c_int32),
        ("unused", c_int32),
        ("ends", c_int32 * MOST_ENDS),
        ("temperature", c_double),
        ("least_share", c_double),
        ("seed", c_uint64),
    )


class Control(Structure):
    """What the host tells a step: see `Control` there. `corrections` follow, those of each kind."""

    _fields_ = (
        ("num_rows", c_int32),
        ("num_others", c_int32),
        ("num_tokens", c_int32),
        ("unused", c_int32),
        ("slots", c_int32 * MOST_ROWS),
        ("drafters", c_int32 * MOST_ROWS),
        ("kinds", c_int32 * MOST_ROWS),
        ("tables", c_int32 * MOST_ROWS),
        ("others", c_int32 * MOST_ROWS * 3),
    )


class SlotArgs(Structure):
    """Where all of it lies: see `SlotArgs` there."""

    _fields_ = (
        ("control", c_void_p),
        ("slots", c_void_p),
        ("tokens", c_void_p),
        ("width", c_int64),
        ("rows", c_void_p),
        ("newest", c_void_p),
        ("token_rows", c_void_p),
        ("logit_rows", c_void_p),
        ("drawing", c_void_p),
        ("chosen", c_void_p),
        ("state_rows", c_void_p),
        ("state_slots", c_void_p),
        ("spare_slot", c_int64),
    )


def row_bytes() -> int:
    """The size of a row of a step; checks that both sides say the same of slots and controls."""
    sizes = (c_int64 * 4)()
    functions().neap_slots_sizes(sizes)
    assert sizes[0] == size_of(Slot)
    assert sizes[2] == size_of(Control)
    return sizes[1]


def correction_bytes() -> int:
    """The size of the corrections of a kind."""
    sizes = (c_int64 * 4)()
    functions().neap_slots_sizes(sizes)
    return sizes[3]


def write_corrections(confidences: "array[int]", address: int) -> None:
    """Writes what corrects the probabilities of each kind of request, by the address of its confidence (uint64), as it
    is now. Of 0: nothing does."""
    functions().neap_confidence_corrections(confidences.buffer_info()[0], len(confidences), address)


def proposers(
    ladder: Handle,
    number: int,
    columns: Sequence[Sequence[Tensor]] = (),
    learned: Tensor | None = None,
    exit_outputs: tuple[Tensor, Tensor] | None = None,
) -> Handle:
    """What drafts for the rows of drafter `number`. `columns`: keys, tokens, counts and shares of the orders of an
    n-gram table; `learned` [N, 16] uint8: the entries of a learned one; `exit_outputs`: where a head puts its tokens
    int64 and probabilities float32, each [MOST_ROWS]. All on the device."""
    pointers: list[Any] = [(c_void_p * len(column))(*(part.data_ptr() for part in column)) for column in columns]
    tokens, probabilities = exit_outputs or (None, None)
    return Handle(
        "proposers",
        ladder.address,
        *(pointers or [None] * 4),
        _pointer(learned),
        c_int64(0 if learned is None else len(learned) // 4),
        c_int64(number),
        _pointer(tokens),
        _pointer(probabilities),
        kept=(ladder, columns, learned, exit_outputs),
    )


def _pointer(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def learned_entries(learned: Handle) -> Tensor:
    """The entries of a learned table [N, 16] uint8, in the table's own memory."""
    entries = c_void_p()
    count = functions().neap_learned_view(learned.address, byref(entries))
    assert entries.value is not None
    memory = (c_int32 * (4 * count)).from_address(entries.value)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, 16)


def changed_entries(learned: Handle, most: int) -> list[int] | None:
    """The numbers of the entries that have changed since the last call. None: they are more than `most` or were too
    many to be noted, or this is the first call."""
    numbers = (c_int64 * most)()
    count = functions().neap_learned_changed(learned.address, numbers, c_int64(most))
    return None if count < 0 else numbers[:count]


class RowsRead(NamedTuple):
    """The rows of a step. `numbers`, of each: its tokens before the step, how many became final, how many drafts were
    verified, and how many tokens its answer may still get, 0 after its end. Of one row after the other: the new tokens
    and by number their proposers, the full model after all others. `reaches`, PLACES of each row: of all drafts, and 0
    where there is none. `drafts`, of each group: those that were verified of each proposer, then those that were
    accepted. `least_left`: the least number of tokens left; 0 if a row is not used."""

    numbers: Iterator[tuple[int, ...]]
    tokens: list[int]
    makers: list[int]
    reaches: "array[float]"
    drafts: Iterator[tuple[int, ...]]
    least_left: int


class RowReader:
    """Reads the rows of steps, into memory of its own."""

    def __init__(self) -> None:
        # Arrays, because ctypes makes a type for each length, which takes longer than all else here.
        self._numbers, self._reaches = array("q", [0]) * (4 * MOST_ROWS), array("d", [0.0]) * (PLACES * MOST_ROWS)
        self._tokens, self._makers = (array("i", [0]) * ((PLACES + 1) * MOST_ROWS) for _ in range(2))
        self._drafts = array("q", [0]) * (2 * NUM_PROPOSERS * MOST_ROWS)
        written = self._numbers, self._tokens, self._makers, self._reaches, self._drafts
        self._written = [each.buffer_info()[0] for each in written]

    def read(self, confidences: Sequence[int], groups: "array[int]", num_groups: int, address: int) -> RowsRead:
        """Reads a step. The confidence of each row, by its address, gets what is shown of its drafts. Rows of 0 are not
        to be used, and have no tokens. `groups` (int32): by which their drafts are counted."""
        count, addresses = len(confidences), array("Q", confidences)
        least_left = functions().neap_rows_read(
            addresses.buffer_info()[0], address, count, groups.buffer_info()[0], num_groups, *self._written
        )
        numbers = self._numbers[: 4 * count].tolist()
        num_tokens = sum(numbers[1::4])
        return RowsRead(
            zip(*[iter(numbers)] * 4, strict=True),
            self._tokens[:num_tokens].tolist(),
            self._makers[:num_tokens].tolist(),
            self._reaches[: PLACES * count],
            zip(*[iter(self._drafts[: 2 * NUM_PROPOSERS * num_groups])] * (2 * NUM_PROPOSERS), strict=True),
            least_left,
        )


def record_worth(reaches: "array[float]", num_rows: int, step: float, decay: float, gains: "array[float]") -> None:
    """See `Worth.record`. Overwrites `reaches`."""
    functions().neap_worth_record(
        reaches.buffer_info()[0], len(reaches), num_rows, step, decay, gains.buffer_info()[0], len(gains)
    )


def begin(rows: Tensor, args: SlotArgs, drafter: int) -> None:
    """Begins the chains of a drafter's rows. `rows`: the tensor of the rows, which says where it runs."""
    ops.load()
    torch.ops.neap.slots_begin.default(rows, addressof(args), drafter)


def draft(rows: Tensor, args: SlotArgs, drafting: Handle, num_rows: int, place: int) -> None:
    """Drafts one place of the chains of the first `num_rows`."""
    ops.load()
    torch.ops.neap.slots_draft.default(rows, addressof(args), drafting.address.value, num_rows, place)


def plan(rows: Tensor, args: SlotArgs) -> None:
    """Fills the pass."""
    ops.load()
    torch.ops.neap.slots_plan.default(rows, addressof(args))


def accept(rows: Tensor, args: SlotArgs) -> None:
    """Accepts what the full model has chosen."""
    ops.load()
    torch.ops.neap.slots_accept.default(rows, addressof(args))
