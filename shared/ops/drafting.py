"""The native objects of drafting, csrc/draft/api.cpp, by the C interface of the compiled library.

They are no ops of torch, because they live as long as a request or a router does and a call of them takes microseconds.
Each is used by one thread at a time. `Handle` keeps what its object refers to.
"""

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from shared import ops

_RESULTS = {
    "neap_ladder_call_gain_s": c_double,
    "neap_ladder_pass_s": c_double,
    "neap_confidence_factor": c_double,
    "neap_confidence_rate": c_int64,
    "neap_learned_entries": c_int64,
    "neap_sequence_num_predicted": c_int64,
    "neap_sequence_propose": c_int64,
    "neap_step_advance": c_int64,
    "neap_step_drop": c_int64,
    "neap_uniform_at": c_double,
    "neap_learned_view": c_int64,
    "neap_learned_changed": c_int64,
    "neap_rows_read": c_int64,
}
# Pointers first and whole numbers as int64, unless an entry says something else.
_OTHER_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "neap_ladder_call_gain_s": (c_void_p, c_int64, c_double),
    "neap_ladder_pass_s": (c_void_p, c_int64),
    "neap_ladder_slow_exit": (c_void_p, c_int64, c_double),
    "neap_rows_read": (c_void_p, c_void_p, c_int64, c_void_p, c_int64, *(c_void_p,) * 5),
    "neap_worth_record": (c_void_p, c_int64, c_int64, c_double, c_double, c_void_p, c_int64),
    "neap_confidence_corrections": (c_void_p, c_int64, c_void_p),
    "neap_learned_learn": (c_void_p, c_uint64, c_void_p, c_int64, c_int64),
    "neap_confidence_factor": (c_void_p, c_int32),
    "neap_uniform_at": (c_uint64, c_uint64),
    "neap_sequence_new": (c_void_p, c_void_p, c_void_p, c_uint64, c_void_p, c_int64, c_void_p),
}
# A proposer in Python: see csrc/draft/step.h.
Script = ctypes.CFUNCTYPE(c_int32, ctypes.POINTER(c_int32), c_int64, ctypes.POINTER(c_double))


@cache
def functions() -> ctypes.PyDLL:
    """The library's functions. They keep the interpreter's lock: to get it back from other threads would take longer
    than they do. Raises as `ops.load`."""
    ops.load()
    loaded = ctypes.PyDLL(str(ops.LIBRARY))
    for name, result in _RESULTS.items():
        getattr(loaded, name).restype = result
    for name, arguments in _OTHER_ARGUMENTS.items():
        getattr(loaded, name).argtypes = arguments
    return loaded


class Handle:
    """Owns a native object of one kind, made from `arguments`. `kept`: what must live as long as it.
    `is_long`: other threads run while it is made."""

    def __init__(self, kind: str, *arguments: Any, kept: Any = None, is_long: bool = False) -> None:
        loaded = ctypes.CDLL(functions()._name) if is_long else functions()
        make, free = getattr(loaded, f"neap_{kind}_new"), getattr(loaded, f"neap_{kind}_free")
        make.restype, free.restype = c_void_p, None
        self.address = c_void_p(make(*arguments))
        self._kept = kept
        weakref.finalize(self, free, self.address).atexit = False


def integers(numbers: Iterable[int]) -> Any:
    """An array of int64 as an argument."""
    listed = list(numbers)
    return (c_int64 * len(listed))(*listed)


def doubles(numbers: Iterable[float]) -> Any:
    """An array of double as an argument."""
    listed = list(numbers)
    return (c_double * len(listed))(*listed)


def tokens_of(tokens: Sequence[int]) -> tuple[c_void_p, c_int64, "array[int]"]:
    """Tokens as two arguments, and what must live until the call returns."""
    kept = array("i", tokens)
    return c_void_p(kept.buffer_info()[0]), c_int64(len(kept)), kept


def address(handle: Handle | None) -> c_void_p:
    return c_void_p(None) if handle is None else handle.address


class AskedChain(NamedTuple):
    """A chain that is to be taken to an exit. `output`: the call, the row and the place of the output from which the
    exit's head goes on after its first `num_seen` tokens; a call of -1 if it has seen none."""

    row: int
    num_seen: int
    drafts: list[int]
    room: int
    output: tuple[int, int, int]
    survival: float
    factor: float
    least_survival: float


class DraftedChain(NamedTuple):
    """`proposers` by number; `probabilities` as the proposers gave them. `is_sound`: false if a proposer, then the only
    one, has drafted what is no token of the model."""

    tokens: list[int]
    proposers: list[int]
    probabilities: list[float]
    is_sound: bool


class Step:
    """Drafts for the sequences of one step: see csrc/draft/step.h. It can be begun again.

    This is the contract of drafting on any device: `begin` with all sequences, `advance` until nobody is to be asked
    (0), with the drafts of a call of an exit in between, as tensors [asked, K]; then `plan` and `read` give all chains
    as arrays. No object stands for a draft.
    """

    def __init__(self) -> None:
        self._functions = functions()
        self._step = Handle("step")
        self._exit = c_int64()
        self._count = 0
        self._width = 1

    def begin(
        self,
        addresses: Sequence[c_void_p],
        rooms: Sequence[int],
        min_layers: Sequence[int],
        are_fixed: Sequence[bool],
        num_sequences: int,
        num_other_tokens: int = 0,
        extra_s: float = 0.0,
        keys_s: Sequence[float] = (),
    ) -> None:
        """`addresses`: those of the sequences. `rooms`: the most drafts of each. Only exits at `min_layers` or deeper
        draft, if it is not 0. Chains that are fixed are drafted and verified whether they pay or not. `num_sequences`
        share the verify pass, with so many other tokens, and it takes `extra_s` seconds more than its measured cost;
        each draft of a sequence takes `keys_s` more to attend to the keys before it."""
        self._count = count = len(addresses)
        self._width = max(1, *rooms)
        numbers = c_int64 * count
        self._functions.neap_step_begin(
            self._step.address,
            c_int64(count),
            (c_void_p * count)(*addresses),
            numbers(*rooms),
            numbers(*min_layers),
            numbers(*are_fixed),
            (c_double * count)(*keys_s),
            c_int64(num_sequences),
            c_int64(num_other_tokens),
            c_double(extra_s),
        )

    def go_on(self, row: int, num_kept: int, forced: Sequence[int], begun: int | None) -> None:
        """Cuts a chain to its first drafts. `forced` stand at the places after them whatever proposers say, and `begun`
        is one more proposal for the place after these."""
        pointer, count, _kept = tokens_of(forced)
        self._functions.neap_step_go_on(
            self._step.address, c_int64(row), c_int64(num_kept), pointer, count, c_int32(-1 if begun is None else begun)
        )

    def advance(self) -> tuple[int, list[AskedChain]]:
        """Drafts on. Returns the exit that is to be asked, by number, and the chains that it is to be asked for."""
        asked = []
        found, numbers, tokens = (c_int64 * 7)(), (c_double * 3)(), (c_int32 * self._width)()
        for number in range(self._functions.neap_step_advance(self._step.address, ctypes.byref(self._exit))):
            self._functions.neap_step_asked(self._step.address, c_int64(number), found, numbers, tokens)
            row, num_seen, num_drafts, room, call, output_row, place = found
            asked.append(AskedChain(row, num_seen, tokens[:num_drafts], room, (call, output_row, place), *numbers))
        return self._exit.value, asked

    def give(self, tokens: Tensor, probabilities: Tensor, lengths: Tensor) -> None:
        """What the exit has drafted: tokens [asked, K] int64 and probabilities [asked, K] float64, of which the first
        `lengths` [asked] int64 count. All contiguous and on the CPU."""
        self._functions.neap_step_give(
            self._step.address,
            c_void_p(tokens.data_ptr()),
            c_void_p(probabilities.data_ptr()),
            c_void_p(lengths.data_ptr()),
            c_int64(tokens.shape[1]),
        )

    def drop(self) -> list[int]:
        """Ends the chains that would have shared the exit. Returns their rows."""
        rows = (c_int32 * self._count)()
        num_rows: int = self._functions.neap_step_drop(self._step.address, rows)
        return rows[:num_rows]

    def plan(self) -> list[int]:
        """How many of each chain's drafts to verify."""
        lengths = (c_int64 * self._count)()
        self._functions.neap_step_plan(self._step.address, lengths)
        return list(lengths)

    def read(self) -> list[DraftedChain]:
        """All chains."""
        count, width = self._count, self._width
        lengths, probabilities = (c_int64 * count)(), (c_double * (count * width))()
        tokens, proposers = (c_int32 * (count * width))(), (c_int32 * (count * width))()
        self._functions.neap_step_read(self._step.address, c_int64(width), lengths, tokens, proposers, probabilities)
        chains = []
        for row, length in enumerate(lengths):
            part = slice(row * width, row * width + abs(length))
            chains.append(DraftedChain(tokens[part], proposers[part], probabilities[part], length >= 0))
        return chains
