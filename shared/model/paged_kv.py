"""Keys and values in pages of one pool: nothing is allocated while requests run, and nothing falls into pieces.

A page holds PAGE_SLOTS positions of one sequence in every layer. The pool has as many as its memory allows, made at start. A cache
takes all pages that its capacity asks for at once and gives them back when it is closed or dropped. What a pass reads is a table on
the device: row r lists the pages of one cache, position by position. A cache has a row only while it is used; the rest wait.
"""

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import Exhausted, InvalidInput
from shared.model.cache import SlotCache

PAGE_SLOTS = 16
# Of the table; at least as many as sequences can meet in one pass.
NUM_ROWS = 256


@dataclass(frozen=True)
class LayerShape:
    """Of one layer's keys and values: `num_heads` Hkv, `key_width` D, `value_width` Dv."""

    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return (
            PAGE_SLOTS * self.num_heads * (self.key_width + self.value_width) * self.dtype.itemsize
        )


def num_pages_of(num_slots: int) -> int:
    """Pages that so many positions take."""
    return -(-num_slots // PAGE_SLOTS)


class PagePool:
    """P pages: per layer keys [P, Hkv, G, D] and values [P, Hkv, G, Dv], and the table `pages` [NUM_ROWS, M] int64 of them.

    One thread takes pages and asks for rows; caches may be dropped by any.
    """

    @torch.inference_mode()
    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_pages: int,
        context_length: int,
        device: torch.device,
    ) -> None:
        # Zeros: what stands in a slot that no query sees must at least be a number.
        self.keys = [
            torch.zeros(
                num_pages, s.num_heads, PAGE_SLOTS, s.key_width, dtype=s.dtype, device=device
            )
            for s in shapes
        ]
        self.values = [
            torch.zeros(
                num_pages, s.num_heads, PAGE_SLOTS, s.value_width, dtype=s.dtype, device=device
            )
            for s in shapes
        ]
        self.page_bytes = sum(shape.page_bytes for shape in shapes)
        self.num_pages = num_pages
        self._pages_per_row = num_pages_of(context_length)
        self.pages = torch.zeros(NUM_ROWS, self._pages_per_row, dtype=torch.int64, device=device)
        # Deques: whoever drops a cache, on whatever thread, only appends to them.
        self._free = deque(range(num_pages))
        self._gone: deque[int] = deque()
        self._rows: OrderedDict[int, int] = OrderedDict()  # cache number -> row, last used last
        self._free_rows = deque(range(NUM_ROWS))
        self._numbers = itertools.count()

    @property
    def num_free(self) -> int:
        """Pages that no cache holds."""
        return len(self._free)

    def new_cache(self, capacity: int) -> "PagedCache":
        """A cache of at least `capacity` positions. Raises `Exhausted` (reason KV_PAGES) and `InvalidInput`."""
        wanted = num_pages_of(capacity)
        if wanted > self._pages_per_row:
            raise InvalidInput(
                f"{capacity} positions are more than the context has", reason="CACHE_CAPACITY"
            )
        if wanted > self.num_free:
            raise Exhausted(
                f"{wanted} pages of keys and values are wanted, {self.num_free} of {self.num_pages} are free",
                reason="KV_PAGES",
            )
        pages = tuple(self._free.popleft() for _ in range(wanted))
        return PagedCache(self, pages, next(self._numbers))

    @torch.inference_mode()
    def row_of(self, cache: "PagedCache") -> int:
        """The table's row of `cache`, filled; another's, unused for longest, where none is free.

        It stays until NUM_ROWS - 1 other caches have been asked for.
        """
        assert not cache.is_closed
        while self._gone:
            row = self._rows.pop(self._gone.popleft(), None)
            if row is not None:
                self._free_rows.append(row)
        row = self._rows.get(cache.number)
        if row is not None:
            self._rows.move_to_end(cache.number)
            return row
        row = self._free_rows.popleft() if self._free_rows else self._rows.popitem(last=False)[1]
        self._rows[cache.number] = row
        listed = torch.tensor(cache.pages, dtype=torch.int64)
        self.pages[row, : len(cache.pages)].copy_(listed, non_blocking=True)
        return row

    def _give_back(self, number: int, pages: tuple[int, ...]) -> None:
        self._gone.append(number)
        self._free.extend(pages)


class PagedCache(SlotCache):
    """A sequence's pages in a pool. Only the passes of a `PagedRunner` read and write it."""

    def __init__(self, pool: PagePool, pages: tuple[int, ...], number: int) -> None:
        super().__init__(len(pages) * PAGE_SLOTS)
        self.pages = pages
        self.number = number
        self._pool = pool
        self._give_back = weakref.finalize(self, pool._give_back, number, pages)
        self._give_back.atexit = False

    @property
    def is_closed(self) -> bool:
        return not self._give_back.alive

    def close(self) -> None:
        """Gives the pages back; otherwise that happens when the cache is dropped. Idempotent."""
        self._give_back()

    @property
    def kv_bytes(self) -> int:
        return len(self.pages) * self._pool.page_bytes

    def stores(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("pages of a pool are no slots in a row: use the PagedRunner")

    @torch.inference_mode()
    def copy(self, other: SlotCache, start: int, end: int) -> None:
        assert isinstance(other, PagedCache)
        assert other._pool is self._pool
        assert not self.is_closed
        assert not other.is_closed
        assert 0 <= start <= end <= min(self.capacity, other.capacity)
        if start == end:
            return
        positions = torch.arange(start, end)
        page, slot = positions // PAGE_SLOTS, positions % PAGE_SLOTS
        where = torch.stack([torch.tensor(self.pages)[page], torch.tensor(other.pages)[page], slot])
        mine, theirs, slot = where.to(self._pool.pages.device, non_blocking=True).unbind()
        for store in (*self._pool.keys, *self._pool.values):
            store[mine, :, slot] = store[theirs, :, slot]
