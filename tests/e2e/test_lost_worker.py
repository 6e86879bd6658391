"""A worker that is killed, as its clients see it."""

import threading
import time

import pytest
from neap.inference.v1 import inference_pb2 as pb

from inference_service.servicer import SERVICE_NAME
from shared.errors import Unavailable
from shared.rpc.client import NeapClient
from tests.worker import save_model
from tests.worker_process import worker_process

pytestmark = [pytest.mark.e2e, pytest.mark.full]
NUM_RUNNING = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def _request(num_tokens):
    return pb.GenerateRequest(
        model_id="tiny",
        text="hello",
        depth=pb.DepthPolicy(full=pb.Full()),
        stopping=pb.Stopping(max_tokens=num_tokens, ignore_eos=True),
    )


def _ready(address):
    with NeapClient(address) as client:
        client.wait_ready(SERVICE_NAME, timeout_s=60)


def _occupy(client):
    """Fills every place of a worker, so that the next request waits; keep what is returned."""
    streams = [client.generate(_request(2000)) for _ in range(NUM_RUNNING)]
    for stream in streams:
        next(stream)
    return streams


def _first_of_waiting(stream):
    """A thread that takes the stream's events, and where they go."""
    events = []
    thread = threading.Thread(target=lambda: events.extend(stream))
    thread.start()
    time.sleep(0.3)
    assert events == []
    return thread, events


def _waiting_at_the_crowded(client):
    """A stream, its thread and its events, where the stream waits at the worker whose places are taken.

    Calls are shared in turn, so those that reach the other worker are answered.
    """
    for _ in range(20):
        stream, events = client.generate(_request(7)), []
        thread = threading.Thread(target=lambda s=stream, e=events: e.extend(s))
        thread.start()
        thread.join(2)
        if thread.is_alive():
            assert events == []
            return stream, thread, events
    raise AssertionError("no call reached the worker whose places are taken")


def test_killed_in_mid_stream_is_unavailable_at_once_and_keeps_the_tokens(folder, tmp_path):
    with (
        worker_process(folder, tmp_path / "registry") as (process, address),
        worker_process(folder, tmp_path / "registry") as (_, other),
        NeapClient(f"ipv4:{address},{other}") as client,
    ):
        _ready(address)
        _ready(other)
        streams = [client.generate(_request(2000)) for _ in range(4)]
        for stream in streams:
            while len(stream.token_ids) < 5:
                next(stream)
        process.kill()
        num_lost = 0
        for stream in streams:
            try:
                list(stream)
            except Unavailable:
                num_lost += 1
                assert len(stream.token_ids) >= 5
            else:
                assert len(stream.token_ids) == 2000
            assert stream.num_attempts == 1  # not made again, though somebody else could have
        assert 0 < num_lost < len(streams)


def test_killed_before_the_first_token_another_worker_takes_over(folder, tmp_path):
    with (
        worker_process(folder, tmp_path / "registry") as (process, address),
        worker_process(folder, tmp_path / "registry") as (_, other),
        NeapClient(f"ipv4:{address},{other}") as client,
        NeapClient(address, num_attempts=1) as crowd,
    ):
        _ready(address)
        _ready(other)
        occupied = _occupy(crowd)
        stream, thread, events = _waiting_at_the_crowded(client)
        process.kill()
        thread.join(60)
        assert len(stream.token_ids) == 7
        assert [event.WhichOneof("event") for event in events].count("started") == 1
        assert stream.num_attempts >= 2
        del occupied


def test_killed_before_the_first_token_a_worker_started_anew_is_found(folder, tmp_path):
    with (
        worker_process(folder, tmp_path / "registry") as (process, address),
        NeapClient(address, num_attempts=100) as client,
    ):
        _ready(address)
        occupied = _occupy(client)
        stream = client.generate(_request(7))
        thread, _ = _first_of_waiting(stream)
        process.kill()
        process.wait(60)
        # While it loads it refuses with UNAVAILABLE, too.
        with worker_process(folder, tmp_path / "registry", listen=address):
            thread.join(60)
            assert not thread.is_alive()
            assert len(stream.token_ids) == 7
        del occupied
