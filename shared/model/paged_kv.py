"""Paged KV (vLLM, 2309.06180): keys and values in blocks of one pool, so nothing is allocated while requests run.

A block holds BLOCK_TOKENS token positions of one sequence, in every layer. The pool is allocated at start and has as
many blocks as its memory allows. A cache takes all blocks for its capacity at once, and returns them when it is closed
or dropped. A pass finds a sequence's blocks through its block table: a row of a tensor on the device that lists the
blocks of one cache in the order of their positions. A cache has a block table only while it is in use; if all are
taken, the least recently used one is filled anew.
"""

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import Exhausted, InvalidInput
from shared.model.cache import KVCache
from shared.model.inference import inference

BLOCK_TOKENS = 16
# At least the largest number of sequences in one pass.
NUM_BLOCK_TABLES = 256


@dataclass(frozen=True)
class LayerShape:
    """The form of one layer's keys and values: `num_heads` Hkv, `key_width` D, `value_width` Dv."""

    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in this layer."""
        width = self.key_width + self.value_width
        return BLOCK_TOKENS * self.num_heads * width * self.dtype.itemsize


def num_blocks_of(num_tokens: int) -> int:
    """Blocks needed for `num_tokens` tokens of one sequence."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockPool:
    """P blocks: per layer that makes some, keys [P, Hkv, G, D] and values [P, Hkv, G, Dv], G = BLOCK_TOKENS.

    `block_tables` [NUM_BLOCK_TABLES, M] int64: M blocks for a whole context each. Threads: one thread makes caches and
    asks for block tables; any thread may close or drop a cache.
    """

    @inference
    def __init__(
        self, shapes: Sequence[LayerShape], num_blocks: int, context_length: int, device: torch.device
    ) -> None:
        def store(shape: LayerShape, width: int) -> Tensor:
            size = (num_blocks, shape.num_heads, BLOCK_TOKENS, width)
            # Zeros, because positions that no query sees must still hold finite numbers.
            return torch.zeros(size, dtype=shape.dtype, device=device)

        self.keys = [store(shape, shape.key_width) for shape in shapes]
        self.values = [store(shape, shape.value_width) for shape in shapes]
        self.block_bytes = sum(shape.block_bytes for shape in shapes)
        self.num_blocks = num_blocks
        self._blocks_per_table = num_blocks_of(context_length)
        self.block_tables = torch.zeros(NUM_BLOCK_TABLES, self._blocks_per_table, dtype=torch.int64, device=device)
        # Deques, because whichever thread drops a cache appends to them.
        self._free = deque(range(num_blocks))
        self._closed: deque[int] = deque()
        # Cache number -> index of its block table, the least recently used first.
        self._tables: OrderedDict[int, int] = OrderedDict()
        self._free_tables = deque(range(NUM_BLOCK_TABLES))
        self._numbers = itertools.count()
        # How often a cache has got a table. Until the next one does, all keep theirs.
        self.num_given = 0

    @property
    def num_free(self) -> int:
        """Number of blocks that no cache holds."""
        return len(self._free)

    def new_cache(self, capacity: int) -> "PagedCache":
        """A cache for at least `capacity` tokens.

        Raises `Exhausted` (reason KV_PAGES) if too few blocks are free, and `InvalidInput` (reason CACHE_CAPACITY) if
        `capacity` exceeds the context length.
        """
        needed = num_blocks_of(capacity)
        if needed > self._blocks_per_table:
            raise InvalidInput(f"{capacity} positions are more than the context has", reason="CACHE_CAPACITY")
        if needed > self.num_free:
            raise Exhausted(
                f"{needed} blocks of KV memory are needed, but only {self.num_free} of {self.num_blocks} are free",
                reason="KV_PAGES",
            )
        blocks = tuple(self._free.popleft() for _ in range(needed))
        return PagedCache(self, blocks, next(self._numbers))

    @inference
    def table_index(self, cache: "PagedCache") -> int:
        """The index in `block_tables` of the cache's block table, which is filled if the cache has none yet.

        If no table is free, the least recently used one is taken from its cache. So the index stays valid until
        NUM_BLOCK_TABLES - 1 other caches have asked for theirs.
        """
        assert not cache.is_closed
        while self._closed:
            table = self._tables.pop(self._closed.popleft(), None)
            if table is not None:
                self._free_tables.append(table)
        table = self._tables.get(cache.number)
        if table is not None:
            self._tables.move_to_end(cache.number)
            return table
        self.num_given += 1
        table = self._free_tables.popleft() if self._free_tables else self._tables.popitem(last=False)[1]
        self._tables[cache.number] = table
        listed = torch.tensor(cache.blocks, dtype=torch.int64)
        self.block_tables[table, : len(cache.blocks)].copy_(listed, non_blocking=True)
        return table

    def _release(self, number: int, blocks: tuple[int, ...]) -> None:
        self._closed.append(number)
        self._free.extend(blocks)


class PagedCache(KVCache):
    """The blocks of one sequence in a pool. Only the passes of the `PagedRunner` that made it read and write it."""

    def __init__(self, pool: BlockPool, blocks: tuple[int, ...], number: int) -> None:
        super().__init__(len(blocks) * BLOCK_TOKENS)
        self.blocks = blocks
        self.number = number
        self._pool = pool
        self._release = weakref.finalize(self, pool._release, number, blocks)
        self._release.atexit = False

    @property
    def is_closed(self) -> bool:
        return not self._release.alive

    def close(self) -> None:
        """Returns the blocks to the pool. Otherwise that happens when the cache is dropped. Idempotent."""
        self._release()

    @property
    def kv_bytes(self) -> int:
        return len(self.blocks) * self._pool.block_bytes

    @inference
    def copy(self, donor: KVCache, start: int, end: int) -> None:
        source = as_paged(donor)
        assert source._pool is self._pool
        assert not self.is_closed
        assert not source.is_closed
        assert 0 <= start <= end <= min(self.capacity, source.capacity)
        if start == end:
            return
        positions = torch.arange(start, end)
        index, place = positions // BLOCK_TOKENS, positions % BLOCK_TOKENS
        where = torch.stack([torch.tensor(self.blocks)[index], torch.tensor(source.blocks)[index], place])
        device = self._pool.block_tables.device
        mine, theirs, place = where.to(device, non_blocking=True).unbind()
        for store in (*self._pool.keys, *self._pool.values):
            store[mine, :, place] = store[theirs, :, place]


def as_paged(cache: KVCache) -> PagedCache:
    """`cache` itself. Raises `TypeError` if it is a cache of another kind, so of another runner."""
    if not isinstance(cache, PagedCache):
        raise TypeError(f"the runner needs a PagedCache, not a {type(cache).__name__}")
    return cache
