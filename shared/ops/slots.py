"""The native side of requests that live on the device: what csrc/draft/slots.h says of slots, rows and steps."""

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_double, c_int32, c_int64, c_uint64, c_void_p
from ctypes import sizeof as size_of
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared import ops
from shared.ops.drafting import Handle, functions

PLACES, MOST_ENDS, MOST_ROWS = 8, 8, 256
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
    """What the host tells a step: see `Control` there. `ratios` follow, those of each row."""

    _fields_ = (
        ("num_rows", c_int32),
        ("num_others", c_int32),
        ("num_tokens", c_int32),
        ("unused", c_int32),
        ("slots", c_int32 * MOST_ROWS),
        ("drafters", c_int32 * MOST_ROWS),
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
    """Of a row of a step, and checks that both sides say the same of slots and controls."""
    sizes = (c_int64 * 4)()
    functions().neap_slots_sizes(sizes)
    assert sizes[0] == size_of(Slot)
    assert sizes[2] == size_of(Control)
    return sizes[1]


def ratio_bytes() -> int:
    """Of the ratios of a row."""
    sizes = (c_int64 * 4)()
    functions().neap_slots_sizes(sizes)
    return sizes[3]


def write_ratios(confidences: Sequence[Handle | None], address: int) -> None:
    """Writes what corrects the probabilities of each request's kind, as it is now. Of None: nothing does."""
    addresses = (c_void_p * len(confidences))(*(each.address.value if each else None for each in confidences))
    functions().neap_confidence_ratios(addresses, c_int64(len(confidences)), c_void_p(address))


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


class ReadRow(NamedTuple):
    """A row after its step. `choices`: its new tokens; `proposers`: of the drafts that were verified; `reaches`: of all
    drafts."""

    num_tokens: int
    num_verified: int
    choices: list[int]
    proposers: list[int]
    reaches: list[float]


def read_rows(sequences: Sequence[Handle | None], lengths: Sequence[int], address: int) -> list[ReadRow]:
    """Reads the rows of a step on the host. Those of None are not to be used.

    A sequence that had `lengths` tokens when the step began gets the new ones, and records what they show of its
    drafts; another one does not.
    """
    count = len(sequences)
    numbers, choices = (c_int64 * (4 * count))(), (c_int32 * ((PLACES + 1) * count))()
    drafters, reaches = (c_int32 * (PLACES * count))(), (c_double * (PLACES * count))()
    functions().neap_sequences_take(
        (c_void_p * count)(*(each.address.value if each else None for each in sequences)),
        c_void_p(address),
        (c_int64 * count)(*lengths),
        c_int64(count),
        numbers,
        choices,
        drafters,
        reaches,
    )
    rows, new, first = [], 0, 0
    for num_tokens, num_drafted, num_verified, num_new in zip(*[iter(numbers)] * 4, strict=True):
        rows.append(
            ReadRow(
                num_tokens,
                num_verified,
                choices[new : new + num_new],
                drafters[first : first + num_verified],
                reaches[first : first + num_drafted],
            )
        )
        new, first = new + PLACES + 1, first + PLACES
    return rows


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
