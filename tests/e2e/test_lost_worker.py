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
        worker_process(folder, tmp_path / "registry", *flags, stderr=log) as (process, address),
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
        wait_until(
            lambda t=thread: (
                not t.is_alive() or scraped(log)["neap_num_requests_waiting", "tiny"] == 1
            )
        )
        if thread.is_alive():
            assert events == []
            return stream, thread, events
    raise AssertionError("no call reached the worker whose places are taken")


def _use_both(client, *logs):
    """Makes calls until each worker has answered one. From then on the client shares its calls in turn."""

    def answered(log):
        return any(name == "neap_request_success_total" for name, *_ in scraped(log))

    wait_until(lambda: list(client.generate(request_of(1))) and all(map(answered, logs)))


@contextmanager
def _two_workers(folder, tmp_path, *flags):
    """(process of the first, client of both, streams of both), all streams begun."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with (
        _measured_worker(folder, tmp_path / "one", *flags) as (process, address, log),
        _measured_worker(folder, tmp_path / "other") as (_, other, other_log),
        NeapClient(f"ipv4:{address},{other}", num_attempts=9, has_affinity=False) as client,
    ):
        _ready(address)
        _ready(other)
        _use_both(client, log, other_log)
        streams = [client.generate(request_of(1500, sampling=SAMPLED)) for _ in range(6)]
        for stream in streams:
            while len(stream.token_ids) < 5:
                next(stream)
        yield process, client, streams


def _check_all_go_on(client, streams):
    """Every stream ends as one that nobody interrupted, and some were."""
    threads = [threading.Thread(target=list, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    whole = client.answer(request_of(1500, sampling=SAMPLED))
    for stream in streams:
        answer = stream.answer()
        assert (answer.token_ids, answer.text) == (whole.token_ids, whole.text)
        assert answer.usage.num_completion_tokens == 1500
        assert not any(one.continued_inexactly for one in answer.resumptions)
    assert any(stream.resumptions for stream in streams)


def test_killed_in_mid_stream_another_worker_goes_on(folder, tmp_path):
    with _two_workers(folder, tmp_path) as (process, client, streams):
        process.kill()
        _check_all_go_on(client, streams)


def test_a_worker_that_stops_waits_for_no_answer_that_goes_on_elsewhere(folder, tmp_path):
    flags = ("--grace-s", "1", "--drain-timeout-s", "3600")
    with _two_workers(folder, tmp_path, *flags) as (process, client, streams):
        process.terminate()
        # Nobody reads on: it is not the end of the answers that lets it stop.
        assert process.wait(60) == 0
        _check_all_go_on(client, streams)


def test_killed_before_the_first_token_another_worker_takes_over(folder, tmp_path):
    with (
        _measured_worker(folder, tmp_path) as (process, address, log),
        worker_process(folder, tmp_path / "registry") as (_, other),
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
    with (
        _measured_worker(folder, tmp_path) as (process, address, log),
        NeapClient(address, num_attempts=100) as client,
    ):
        _ready(address)
        occupied = _occupy(client)
        stream = client.generate(request_of(7))
        thread, _ = _waiting(stream, log)
        process.kill()
        process.wait(60)
        # While it loads it refuses with UNAVAILABLE, too.
        with worker_process(folder, tmp_path / "registry", listen=address):
            thread.join(60)
            assert not thread.is_alive()
            assert len(stream.token_ids) == 7
        del occupied
