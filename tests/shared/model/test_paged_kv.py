"""Pages are taken and given back whole, and rows of the table follow who is used."""

import gc
import threading

import pytest
import torch

from shared.errors import Exhausted, InvalidInput
from shared.model import paged_kv
from shared.model.paged_kv import PAGE_SLOTS, LayerShape, PagePool

SHAPES = [LayerShape(2, 4, 6, torch.float32), LayerShape(1, 8, 8, torch.float32)]


def make_pool(num_pages: int = 8, context_length: int = 100) -> PagePool:
    return PagePool(SHAPES, num_pages, context_length, torch.device("cpu"))


def row(pool: PagePool, cache: paged_kv.PagedCache) -> list[int]:
    return pool.pages[pool.row_of(cache)][: len(cache.pages)].tolist()


def test_a_cache_takes_whole_pages_and_gives_them_back_however_it_ends() -> None:
    pool = make_pool()
    first, second = pool.new_cache(PAGE_SLOTS + 1), pool.new_cache(1)
    assert (first.capacity, second.capacity) == (2 * PAGE_SLOTS, PAGE_SLOTS)
    assert not set(first.pages) & set(second.pages)
    assert pool.num_free == 5
    first.close()
    first.close()
    assert pool.num_free == 7
    second.circle = second  # found by the collector, not by counting references
    del second
    gc.collect()
    assert pool.num_free == 8
    held = [pool.new_cache(1)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.num_free == 8


def test_what_does_not_fit_is_refused_and_takes_nothing() -> None:
    pool = make_pool(num_pages=3)
    kept = pool.new_cache(2 * PAGE_SLOTS)
    with pytest.raises(Exhausted, match="2 pages of keys") as refused:
        pool.new_cache(PAGE_SLOTS + 1)
    assert refused.value.reason == "KV_PAGES"
    assert pool.num_free == 1
    with pytest.raises(InvalidInput, match="more than the context"):
        pool.new_cache(8 * PAGE_SLOTS)
    with pytest.raises(InvalidInput, match="do not fit"):
        kept.begin(2 * PAGE_SLOTS, 1)
    assert kept.kv_bytes == 2 * PAGE_SLOTS * 4 * (2 * 4 + 2 * 6 + 8 + 8)


def test_rows_go_to_those_in_use_and_list_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_kv, "NUM_ROWS", 2)
    pool = make_pool()
    caches = [pool.new_cache(size) for size in (20, 40, 5)]
    for cache in (*caches, *caches[::-1]):
        assert row(pool, cache) == list(cache.pages)
    first, second = pool.row_of(caches[0]), pool.row_of(caches[1])
    assert first != second
    pool.row_of(caches[0])
    assert pool.row_of(caches[2]) == second  # the one unused for longest gave way
    assert pool.row_of(caches[0]) == first
    del cache
    caches.pop(0)  # its row is free, so the other keeps its own
    assert pool.row_of(caches[0]) == first
    assert pool.row_of(caches[1]) == second
    assert row(pool, caches[0]) == list(caches[0].pages)


def test_copies_are_of_the_positions_asked_for_and_no_more() -> None:
    pool = make_pool()
    donor, reader = pool.new_cache(50), pool.new_cache(40)
    with torch.inference_mode():
        for store in (*pool.keys, *pool.values):
            store.copy_(torch.randn(store.shape))
    held = [store.clone() for store in (*pool.keys, *pool.values)]
    reader.copy(donor, 10, 37)
    for store, before in zip((*pool.keys, *pool.values), held, strict=True):
        for position in range(40):
            page, slot = divmod(position, PAGE_SLOTS)
            source = donor if 10 <= position < 37 else reader
            expected = before[source.pages[page], :, slot]
            assert torch.equal(store[reader.pages[page], :, slot], expected)
        others = [page for page in range(pool.num_pages) if page not in reader.pages]
        assert torch.equal(store[others], before[others])
