"""Caches take and return whole blocks, and block tables go to the caches in use."""

import gc
import threading

import pytest
import torch

from shared.errors import Exhausted, InvalidInput
from shared.model import paged_kv
from shared.model.paged_kv import BLOCK_TOKENS, BlockPool, LayerShape

SHAPES = [LayerShape(2, 4, 6, torch.float32), LayerShape(1, 8, 8, torch.float32)]


def make_pool(num_blocks: int = 8, context_length: int = 100) -> BlockPool:
    return BlockPool(SHAPES, num_blocks, context_length, torch.device("cpu"))


def block_table(pool: BlockPool, cache: paged_kv.PagedCache) -> list[int]:
    return pool.block_tables[pool.table_index(cache)][: len(cache.blocks)].tolist()


def test_a_cache_takes_whole_blocks_and_returns_them_however_it_ends():
    pool = make_pool()
    first, second = pool.new_cache(BLOCK_TOKENS + 1), pool.new_cache(1)
    assert (first.capacity, second.capacity) == (2 * BLOCK_TOKENS, BLOCK_TOKENS)
    assert not set(first.blocks) & set(second.blocks)
    assert pool.num_free == 5
    first.close()
    first.close()
    assert pool.num_free == 7
    second.circle = second  # freed by the garbage collector, not by its reference count
    del second
    gc.collect()
    assert pool.num_free == 8
    held = [pool.new_cache(1)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.num_free == 8


def test_what_does_not_fit_is_refused_and_takes_nothing():
    pool = make_pool(num_blocks=3)
    kept = pool.new_cache(2 * BLOCK_TOKENS)
    with pytest.raises(Exhausted, match="2 blocks of KV memory") as refused:
        pool.new_cache(BLOCK_TOKENS + 1)
    assert refused.value.reason == "KV_PAGES"
    assert pool.num_free == 1
    with pytest.raises(InvalidInput, match="more than the context"):
        pool.new_cache(8 * BLOCK_TOKENS)
    with pytest.raises(InvalidInput, match="do not fit"):
        kept.begin(2 * BLOCK_TOKENS, 1)
    assert kept.kv_bytes == 2 * BLOCK_TOKENS * 4 * (2 * 4 + 2 * 6 + 8 + 8)


def test_block_tables_go_to_caches_in_use_and_list_their_blocks(monkeypatch):
    monkeypatch.setattr(paged_kv, "NUM_BLOCK_TABLES", 2)
    pool = make_pool()
    caches = [pool.new_cache(size) for size in (20, 40, 5)]
    for cache in (*caches, *caches[::-1]):
        assert block_table(pool, cache) == list(cache.blocks)
    first, second = pool.table_index(caches[0]), pool.table_index(caches[1])
    assert first != second
    pool.table_index(caches[0])
    assert pool.table_index(caches[2]) == second  # the least recently used one was taken
    assert pool.table_index(caches[0]) == first
    del cache
    caches.pop(0)  # its block table is free, so the other cache keeps its own
    assert pool.table_index(caches[0]) == first
    assert pool.table_index(caches[1]) == second
    assert block_table(pool, caches[0]) == list(caches[0].blocks)


def test_copies_are_of_the_positions_asked_for_and_no_more():
    pool = make_pool()
    donor, reader = pool.new_cache(50), pool.new_cache(40)
    with torch.inference_mode():
        for store in (*pool.keys, *pool.values):
            store.copy_(torch.randn(store.shape))
    held = [store.clone() for store in (*pool.keys, *pool.values)]
    reader.copy(donor, 10, 37)
    for store, before in zip((*pool.keys, *pool.values), held, strict=True):
        for position in range(40):
            index, place = divmod(position, BLOCK_TOKENS)
            source = donor if 10 <= position < 37 else reader
            expected = before[source.blocks[index], :, place]
            assert torch.equal(store[reader.blocks[index], :, place], expected)
        others = [block for block in range(pool.num_blocks) if block not in reader.blocks]
        assert torch.equal(store[others], before[others])
