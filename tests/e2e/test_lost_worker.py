"""A worker that is killed, as its clients see it."""

import threading
from contextlib import contextmanager

import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.servicer import SERVICE_NAME
from tests.exported_metrics import scraped
from tests.generation import request_of
from tests.waiting import wait_until
from tests.worker_process import worker_process

pytestmark = [pytest.mark.e2e, pytest.mark.full]
NUM_RUNNING = 16
SAMPLED = pb.Sampling(temperature=0.9, seed=4)


def _ready(address):
    with NeapClient(address) as client:
        client.wait_ready(SERVICE_NAME, timeout_s=60)


@contextmanager
def _measured_worker(folder, tmp_path, *more):
    """(process, address, log) of a worker that serves its metrics."""
    flags = ("--metrics-listen", "127.0.0.1:0", *more)
    with (
        (tmp_path / "log").open("wb") as log,
        worker_process(folder, tmp_path / "registry", *flags, stderr=log, is_forked=True) as (process, address),
    ):
        yield process, address, tmp_path / "log"


def _occupy(client):
    """Fills every place of a worker, so that the next request waits; keep what is returned."""
    streams = [client.generate(request_of(2000)) for _ in range(NUM_RUNNING)]
    for stream in streams:
        next(stream)
    return streams


def _waiting(stream, log):
    """A thread that takes the events of a stream that waits for a place, and where they go."""
    events = []
    thread = threading.Thread(target=lambda: events.extend(stream))
    thread.start()
    wait_until(lambda: scraped(log)["neap_num_requests_waiting", "tiny"] == 1)
    assert events == []
    return thread, events


def _waiting_at_the_crowded(client, log):
    """A stream, its thread and its events, where the stream waits at the worker whose places are taken.

    Calls are shared in turn, so those that reach the other worker are answered.
    """
    for _ in range(20):
        stream, events = client.generate(request_of(7)), []
        thread = threading.Thread(target=lambda s=stream, e=events: e.extend(s))
        thread.start()
        wait_until(lambda t=thread: not t.is_alive() or scraped(log)["neap_num_requests_waiting", "tiny"] == 1)
        if thread.is_alive():
            assert events == []
            return stream, thread, events
    raise AssertionError("no call reached the worker whose places are taken")


def test_killed_before_the_first_token_another_worker_takes_over(folder, tmp_path):
    with (
        _measured_worker(folder, tmp_path) as (process, address, log),
        worker_process(folder, tmp_path / "registry", is_forked=True) as (_, other),
        NeapClient(f"ipv4:{address},{other}", has_affinity=False) as client,
        NeapClient(address, num_attempts=1) as crowd,
    ):
        _ready(address)
        _ready(other)
        occupied = _occupy(crowd)
        stream, thread, events = _waiting_at_the_crowded(client, log)
        process.kill()
        thread.join(60)
        assert len(stream.token_ids) == 7
        assert [event.WhichOneof("event") for event in events].count("started") == 1
        assert stream.num_attempts >= 2
        del occupied


def test_killed_before_the_first_token_a_worker_started_anew_is_found(folder, tmp_path):
    with _measured_worker(folder, tmp_path) as (process, address, log), NeapClient(address, num_attempts=100) as client:
        _ready(address)
        occupied = _occupy(client)
        stream = client.generate(request_of(7))
        thread, _ = _waiting(stream, log)
        process.kill()
        process.wait(60)
        # While it loads it refuses with UNAVAILABLE, too.
        with worker_process(folder, tmp_path / "registry", listen=address, is_forked=True):
            thread.join(60)
            assert not thread.is_alive()
            assert len(stream.token_ids) == 7
        del occupied
