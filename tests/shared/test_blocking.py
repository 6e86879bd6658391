"""Blocking calls in bounded thread pools."""

import asyncio
import threading
from contextlib import closing
from contextvars import ContextVar

import pytest

from shared.blocking import BlockingPool, check_wanted
from shared.errors import Cancelled, Exhausted
from tests.waiting import wait_until_async


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


async def test_a_client_has_half_of_the_threads_and_of_the_queue():
    client, go = ContextVar("client", default=""), threading.Event()
    begun = []

    def hang(who: str) -> None:
        begun.append(who)
        assert go.wait(60)

    with closing(BlockingPool(4, 12, max_wait_s=60.0, client=client.get)) as pool:
        client.set("one")
        calls = [asyncio.create_task(pool.call(hang, "one")) for _ in range(6)]
        await asyncio.sleep(0)
        with pytest.raises(Exhausted):
            await pool.call(hang, "one")
        calls[5].cancel()  # while it waits
        client.set("two")
        assert await pool.call(lambda: "free") == "free"
        assert begun == ["one"] * 2
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        client.set("one")
        calls.append(asyncio.create_task(pool.call(hang, "one")))
        client.set("two")
        assert await pool.call(lambda: "free") == "free"
        assert begun == ["one"] * 2, "a call whose caller has gone holds its thread"
        go.set()
        await asyncio.gather(*calls[1:5], calls[6])
        assert len(begun) == 6
        # The thread of the call whose caller has gone says so last.
        await wait_until_async(lambda: not pool._shares)


@pytest.mark.parametrize("client", ["", "one"])
async def test_waiting_for_a_share_has_an_end(client):
    go = threading.Event()
    with closing(BlockingPool(2, 8, max_wait_s=0.05, client=lambda: client)) as pool:
        hanging = [asyncio.create_task(pool.call(go.wait, 60)) for _ in range(4)]
        await asyncio.wait(hanging, timeout=60, return_when=asyncio.FIRST_EXCEPTION)
        go.set()
        results = await asyncio.gather(*hanging, return_exceptions=True)
        assert sum(isinstance(result, Exhausted) for result in results) == (3 if client else 2)


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
