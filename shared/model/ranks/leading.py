"""Rank 0's runner: what is asked of it, it tells the other ranks before it does its own part."""

import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor

from shared.errors import Unavailable
from shared.model.cache import KVCache
from shared.model.inference import inference
from shared.model.ragged import RaggedSequence
from shared.model.ranks.group import Ranks
from shared.model.runner import CapturedStates, Runner

Note = list[int | str]


class LeadingCache(KVCache):
    """A cache of which each rank has the part of its own heads. `own`: that of this rank."""

    def __init__(self, own: KVCache, number: int, notes: "deque[Note]") -> None:
        self.own, self.number, self._notes = own, number, notes
        self.capacity = own.capacity
        weakref.finalize(self, notes.append, ["drop", number]).atexit = False

    @property
    def origin(self) -> int:
        return self.own.origin

    @origin.setter
    def origin(self, place: int) -> None:
        self.own.origin = place
        self._notes.append(["origin", self.number, place])

    def copy(self, donor: KVCache, start: int, end: int) -> None:
        source = _leading(donor)
        self.own.copy(source.own, start, end)
        self._notes.append(["copy", self.number, source.number, start, end])

    @property
    def kv_bytes(self) -> int:
        """Those of this rank: each has as many."""
        return self.own.kv_bytes


def _leading(cache: KVCache) -> LeadingCache:
    if not isinstance(cache, LeadingCache):
        raise TypeError(f"the runner needs a LeadingCache, not a {type(cache).__name__}")
    return cache


class LeadingRunner:
    """A `Runner` over all ranks. Head and embedding are whole on rank 0, so only passes through layers are told; what
    happens to caches between them goes along with the next one.

    A pass that fails leaves the ranks out of step, so later ones raise `Unavailable` (reason RANK_LOST), too.
    """

    def __init__(self, own: Runner, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._notes: deque[Note] = deque()
        self._numbers = itertools.count()
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        """Whatever needs no other rank."""
        return getattr(self._own, name)

    @property
    def description(self) -> str:
        return f"{self._own.description}, by {self._ranks.size} ranks"

    def prepare(self, depths: Sequence[int]) -> Iterator[None]:
        """Nothing: a pass that is recorded is recorded by all ranks, so at its first use."""
        return iter(())

    def new_cache(self, capacity: int) -> LeadingCache:
        own, number = self._own.new_cache(capacity), next(self._numbers)
        self._notes.append(["new", number, capacity])
        return LeadingCache(own, number, self._notes)

    def reserve(self, cache: KVCache) -> None:
        """Here. The others' caches take as much, at their first pass."""
        self._own.reserve(_leading(cache).own)

    def run(
        self,
        token_ids: Tensor,
        cache: KVCache,
        *,
        first: int,
        last: int,
        base: int,
        hidden: Tensor | None = None,
        captured: CapturedStates | None = None,
        read_length: int | None = None,
    ) -> Tensor:
        sequence = RaggedSequence(cache, base, token_ids.shape[1], read_length)
        return self._together(token_ids, [sequence], first, last, hidden, captured, is_ragged=False)

    def run_ragged(
        self,
        token_ids: Tensor,
        sequences: Sequence[RaggedSequence],
        *,
        first: int,
        last: int,
        hidden: Tensor | None = None,
        captured: CapturedStates | None = None,
    ) -> Tensor:
        return self._together(token_ids, sequences, first, last, hidden, captured, is_ragged=True)

    @inference
    def _together(
        self,
        token_ids: Tensor,
        sequences: Sequence[RaggedSequence],
        first: int,
        last: int,
        hidden: Tensor | None,
        captured: CapturedStates | None,
        *,
        is_ragged: bool,
    ) -> Tensor:
        own = [RaggedSequence(_leading(s.cache).own, s.base, s.num_tokens, s.read_length) for s in sequences]
        for sequence in own:
            sequence.cache.begin(sequence.base, sequence.num_tokens)  # raises before anybody is told
        if self._is_lost:
            raise _lost()
        numbers = [_leading(sequence.cache).number for sequence in sequences]
        try:
            message = {
                "notes": [self._notes.popleft() for _ in range(len(self._notes))],
                "tokens": token_ids[0].tolist(),
                "sequences": [[n, s.base, s.num_tokens, s.read_length] for n, s in zip(numbers, own, strict=True)],
                "layers": [first, last],
                "captures": captured is not None,
                "ragged": is_ragged,
            }
            self._ranks.tell(message)
            if hidden is not None:
                hidden = hidden.contiguous()
                self._ranks.send_states(hidden)
            return run_part(self._own, token_ids, own, first, last, hidden, captured, is_ragged=is_ragged)
        except Exception as error:
            self._is_lost = True
            raise _lost() from error


def _lost() -> Unavailable:
    return Unavailable("a rank of this worker is lost, or out of step with the others", reason="RANK_LOST")


def run_part(
    runner: Runner,
    token_ids: Tensor,
    sequences: Sequence[RaggedSequence],
    first: int,
    last: int,
    hidden: Tensor | None,
    captured: CapturedStates | None,
    *,
    is_ragged: bool,
) -> Tensor:
    """This rank's part of a pass, over caches of its own runner."""
    layers: dict[str, Any] = {"first": first, "last": last, "hidden": hidden, "captured": captured}
    if is_ragged:
        return runner.run_ragged(token_ids, sequences, **layers)
    (only,) = sequences
    return runner.run(token_ids, only.cache, base=only.base, read_length=only.read_length, **layers)


def lead(own: Runner, ranks: Ranks) -> Runner:
    """The runner over all ranks of which `own` is that of rank 0."""
    return cast(Runner, LeadingRunner(own, ranks))
