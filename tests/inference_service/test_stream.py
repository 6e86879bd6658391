import asyncio
import threading

import pytest

from inference_service.stream import EventStream
from shared.engine.request.request import TokenChunk
from shared.errors import Exhausted


class Handle:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def cancel(self) -> None:
        self.calls.append("cancel")


def _chunks(number):
    return [TokenChunk(str(index), ()) for index in range(number)]


async def test_events_cross_threads_in_order_and_end_with_none():
    stream, events = EventStream(), _chunks(200)
    stream.attach(Handle())
    thread = threading.Thread(target=lambda: [stream.push(event) for event in [*events, None]])
    thread.start()
    got = []
    while (event := await asyncio.wait_for(stream.next(), 60)) is not None:
        got.append(event)
    assert got == events
    thread.join()


async def test_a_full_stream_pauses_and_half_of_it_resumes():
    stream, handle = EventStream(capacity=4), Handle()
    stream.attach(handle)
    for event in _chunks(3):
        stream.push(event)
    assert handle.calls == []
    for event in _chunks(2):
        stream.push(event)
    assert handle.calls == ["pause"]
    await stream.next()
    await stream.next()
    assert handle.calls == ["pause"]
    await stream.next()
    assert handle.calls == ["pause", "resume"]
    for event in _chunks(2):
        stream.push(event)
    assert handle.calls == ["pause", "resume", "pause"]


async def test_events_before_the_handle_count():
    stream, handle = EventStream(capacity=2), Handle()
    for event in _chunks(2):
        stream.push(event)
    stream.attach(handle)
    assert handle.calls == ["pause"]


async def test_errors_are_raised_where_they_stand():
    stream = EventStream()
    stream.push(*_chunks(1))
    stream.push(Exhausted("full"))
    assert await stream.next() == _chunks(1)[0]
    with pytest.raises(Exhausted):
        await stream.next()


@pytest.mark.parametrize("close_first", [True, False])
async def test_closing_cancels_whenever_the_handle_comes(close_first):
    stream, handle = EventStream(capacity=1), Handle()
    if close_first:
        stream.close()
        stream.attach(handle)
    else:
        stream.attach(handle)
        stream.close()
    stream.push(*_chunks(1))
    assert handle.calls == ["cancel"]


def test_a_loop_that_is_gone_cancels():
    async def make():
        return EventStream()

    stream, handle = asyncio.run(make()), Handle()
    stream.attach(handle)
    stream.push(*_chunks(1))
    assert handle.calls == ["cancel"]
