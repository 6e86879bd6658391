"""Routers of pools that have one head: a worker fetches it once, and has it in memory once."""

import asyncio
from dataclasses import replace

import pytest

from inference_service.routers import RouterChoice, RouterStore
from shared.engine.engine import Engine
from shared.ladder.artefact import pack_ladder
from shared.ladder.blob_names import HEADS_BLOB, LADDER_BLOB
from tests.fixed_costs import fixed_cost_engine
from tests.random_ladder import random_confidence, random_ladder

NUM_POOLS = 6


@pytest.fixture
def publish_family(registry, loaded):
    """The model's own router is version 1, those of the pools p0, p1, .. have its head."""
    first = random_ladder(loaded, 0, (0,))
    manifest, blobs = pack_ladder(first, {})
    registry.publish("tiny", manifest, blobs, request_id="first", aliases=["latest"])
    for number in range(NUM_POOLS):
        exits = (replace(first.exits[0], confidence=random_confidence(loaded, number)),)
        of_pool = pack_ladder(replace(first, exits=exits), {}, blobs[LADDER_BLOB])
        registry.publish(
            "tiny",
            {**of_pool[0], "pool": f"p{number}"},
            of_pool[1],
            request_id=str(number),
            aliases=[f"latest@p{number}"],
        )


@pytest.mark.usefixtures("publish_family")
@pytest.mark.parametrize("parent_comes_first", [True, False])
async def test_pools_have_one_head_however_they_come(registry, loaded, parent_comes_first):
    read: list[str] = []

    def read_blob(published, name):
        read.append(name)
        return registry.read_blob(published, name)

    with fixed_cost_engine(loaded) as engine:
        store = RouterStore(registry, read_blob=read_blob)
        store.bind_with("tiny", engine)
        whole = 0
        if parent_comes_first:
            await store.select(loaded, RouterChoice())
            whole = engine.ladders.num_bytes
        routers = await asyncio.gather(
            *(store.select(loaded, RouterChoice(), pool=f"p{number}") for number in range(NUM_POOLS))
        )
        own = await store.select(loaded, RouterChoice())
        heads = {id(router.ladder.exits[0].head) for router in (*routers, own)}
        assert len(heads) == 1
        assert len({router.version for router in routers}) == NUM_POOLS
        if parent_comes_first:
            assert HEADS_BLOB not in read
            assert engine.ladders.num_bytes < whole * 1.4


@pytest.mark.usefixtures("publish_family")
async def test_what_memory_has_no_room_for_leaves_and_comes_again(registry, loaded):
    with fixed_cost_engine(loaded) as engine:
        store = RouterStore(registry)
        store.bind_with("tiny", engine)
        await store.select(loaded, RouterChoice(), pool="p0")
        one = engine.ladders.num_bytes
        await store.select(loaded, RouterChoice(), pool="p1")
        each = engine.ladders.num_bytes - one
        engine_of_three(engine, one + 2 * each)
        seen = []
        for number in (2, 3, 4, 0):
            seen.append(await store.select(loaded, RouterChoice(), pool=f"p{number}"))
            assert engine.ladders.num_bytes <= engine.ladders.max_bytes
        assert [router.version for router in store.loaded("tiny")] == [2, 5, 6]
        assert seen[-1].version == 2


def engine_of_three(engine: Engine, num_bytes: int) -> None:
    engine.ladders.max_bytes = num_bytes
