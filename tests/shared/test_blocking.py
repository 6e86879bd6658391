"""Blocking calls in bounded thread pools."""

import asyncio
import threading
from contextlib import closing

import pytest

from shared.blocking import BlockingPool, check_wanted
from shared.errors import Cancelled, Exhausted


async def test_a_call_that_has_not_begun_in_time_is_withdrawn_and_one_that_has_is_awaited():
    go, begun, ran = threading.Event(), threading.Event(), []

    def hang() -> str:
        begun.set()
        assert go.wait(60)
        return "done"

    with closing(BlockingPool(1, max_wait_s=0.05)) as pool:
        hanging = asyncio.create_task(pool.call(hang))
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(3):
            with pytest.raises(Exhausted) as caught:
                await pool.call(ran.append, 1)
            assert caught.value.reason == "TOO_MANY_CALLS"
        assert not hanging.done()
        go.set()
        assert await hanging == "done"
        assert await pool.call(lambda: "next") == "next"
    assert ran == []


async def test_a_cancelled_caller_is_told_that_it_was_cancelled():
    go = threading.Event()
    with closing(BlockingPool(1, max_wait_s=60.0)) as pool:
        hanging = asyncio.create_task(pool.call(go.wait, 60))
        waiting = asyncio.create_task(pool.call(go.wait, 60))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go.set()
        assert await hanging


async def test_no_more_than_so_many_calls_are_pending():
    go = threading.Event()
    with closing(BlockingPool(1, 2)) as pool:
        pending = [asyncio.create_task(pool.call(go.wait, 60)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Exhausted):
            await pool.call(go.wait, 60)
        go.set()
        assert await asyncio.gather(*pending) == [True, True]


async def test_a_running_call_whose_caller_has_gone_ends_at_its_next_check():
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            while True:
                check_wanted()
        except Cancelled:
            ended.set()
            raise

    with closing(BlockingPool(1)) as pool:
        working = asyncio.create_task(pool.call(work))
        await asyncio.to_thread(begun.wait, 60)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert await asyncio.to_thread(ended.wait, 60)
        await pool.call(check_wanted)  # which is another call
