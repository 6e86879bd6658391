"""Whether a token gets the same bits in passes of every size that a paged runner has, at any place in them, beside
others and beside padding, through its head at every size, and in a chunk of a long prompt."""

from collections.abc import Iterator

import torch
from torch import Tensor

from shared.model.paged_kv import BLOCK_TOKENS, PagedCache, num_blocks_of
from shared.model.paged_pass import TokenPlaces
from shared.model.paged_runner import PagedRunner
from shared.model.ragged import RaggedSequence

# Tokens of the sequence that is run again and again.
_TOKENS = 11


@torch.inference_mode()
def why_not_in_company(runner: PagedRunner) -> str:
    """What gives a token other bits than a pass of the smallest size, as a sentence; empty if nothing does."""
    loaded = runner.loaded
    count = min(_TOKENS, loaded.context_length)
    ids = torch.randint(loaded.vocabulary_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    alone = runner.new_cache(count)
    states = runner.run(runner.ids(ids), alone, first=0, last=runner.num_layers, base=0)[0]
    logits = runner.logits(states)
    for size in runner.pass_sizes:
        if not _agrees(runner, size, ids, alone, states):
            return f"a token's bits differ in passes of {size} tokens"
    for size in runner.head_sizes:
        if size >= count:
            others = torch.zeros(size - count, states.shape[1], dtype=states.dtype, device=states.device)
            if not torch.equal(runner.logits(torch.cat([others, states]))[-count:], logits):
                return f"the logits of a token differ beside those of {size - 1} others"
    for size in runner.lane_sizes:
        chunk = runner.new_cache(count)
        runner.read(size, ids, chunk, 0)
        if not _hold_the_same(runner, chunk, alone, count):
            return f"a token's keys and values differ in chunks of {size} tokens"
    runner.drop_lane()  # the engine records those that it uses
    return ""


def _agrees(runner: PagedRunner, size: int, ids: list[int], alone: PagedCache, states: Tensor) -> bool:
    """Whether tokens get these states, keys and values as the first of a pass of this size and behind others, as many
    as there is room for. The rest is padding, for which everything is computed, too."""
    again = runner.new_cache(len(ids))
    room = min(size - len(ids), runner.loaded.context_length, runner.pool.num_free * BLOCK_TOKENS)
    beside = runner.new_cache(max(room, 1))
    run = runner.recorded_pass(size)
    for before in {0, max(room, 0)}:
        places = TokenPlaces()
        for cache, count in ((beside, before), (again, len(ids))):
            sequence = RaggedSequence(cache, 0, count)
            places.positions += range(count)
            places.seen_at += range(count)
            places.regimes += map(runner.regimes.of, sequence.lengths)
        tables = [runner.pool.table_index(beside)] * before + [runner.pool.table_index(again)] * len(ids)
        tokens = [7 * place % runner.loaded.vocabulary_size for place in range(before)] + ids
        runner.token_buffer(size).fill(torch.tensor(tokens), tables, places)
        run()
        found = runner.left_at(runner.num_layers)[before : before + len(ids)]
        if not torch.equal(found, states) or not _hold_the_same(runner, again, alone, len(ids)):
            return False
    return True


def _hold_the_same(runner: PagedRunner, one: PagedCache, other: PagedCache, count: int) -> bool:
    """Whether two caches have the same keys and values of `count` tokens."""
    return all(torch.equal(*pair) for pair in zip(_held(runner, one, count), _held(runner, other, count), strict=True))


def _held(runner: PagedRunner, cache: PagedCache, count: int) -> Iterator[Tensor]:
    blocks = list(cache.blocks[: num_blocks_of(count)])
    for store in (*runner.pool.keys, *runner.pool.values):
        yield store[blocks].transpose(1, 2).flatten(0, 1)[:count]  # [count, Hkv, D]
