"""Watches of both clients: they outlive a restart of the service, and ask a service that is stopping no faster than any
other."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from neap_client import NeapClient, retry
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.calibration.v1 import calibration_pb2_grpc
from neap_client.errors import Cancelled, DeadlineExceeded, Exhausted, NeapError, NotFound, Unavailable

from shared.rpc.status import code_of, to_status, trailing_metadata


class Watched(calibration_pb2_grpc.CalibrationServiceServicer):
    """Each stream sends a state of RUNNING and then does what `endings` says next: raises an error, or ends if it is
    None.

    `held`: after the caller has gone.
    """

    def __init__(self, *endings: NeapError | None, sends: bool = True, held: bool = False) -> None:
        self.endings, self.sends, self.held = list(endings), sends, held

    def WatchCalibration(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        if self.sends:
            job = pb.Calibration(calibration_id=request.calibration_id, state=pb.STATE_RUNNING)
            yield pb.WatchCalibrationResponse(calibration=job)
        if self.held:
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait()
        ending = self.endings.pop(0)
        if ending is not None:
            context.set_trailing_metadata(trailing_metadata(to_status(ending)))
            context.abort(code_of(ending), ending.message)


@contextmanager
def serving(watched: Watched, address: str = "127.0.0.1:0") -> Iterator[tuple[str, grpc.Server]]:
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    calibration_pb2_grpc.add_CalibrationServiceServicer_to_server(watched, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MAX_BACKOFF_S", 0.05)


STOPPING = Unavailable("the service is shutting down", reason="SHUTTING_DOWN")
FULL = Exhausted("too many watch streams", reason="TOO_MANY_WATCHERS", retry_after_s=0.01)


def test_a_watch_outlives_a_restart(make_client):
    """The service goes, and after it has come back it refuses more often than the client repeats a call."""
    lost: list[NeapError] = []
    with serving(Watched(STOPPING)) as (target, first):
        second = Watched(*[STOPPING, FULL] * 4, None, sends=False)
        restarted = serving(second, target)

        def restart(error: NeapError) -> None:
            lost.append(error)
            first.stop(None).wait()
            restarted.__enter__()

        with make_client(target, num_attempts=2) as client:
            seen = list(client.watch_calibration("one", on_lost=restart))
        restarted.__exit__(None, None, None)
    assert [job.calibration_id for job in seen] == ["one"]
    assert not second.endings
    assert [error.reason for error in lost] == ["SHUTTING_DOWN"], "once for an outage"


def test_a_watch_that_never_began_ends_after_the_clients_attempts(make_client):
    with (
        serving(Watched(*[STOPPING] * 9, sends=False)) as (target, _),
        make_client(target, num_attempts=3) as client,
        pytest.raises(Unavailable),
    ):
        list(client.watch_calibration("one"))


def test_errors_that_no_restart_mends_end_a_watch(make_client):
    gone = NotFound("no such job", reason="CALIBRATION_NOT_FOUND")
    with serving(Watched(STOPPING, gone)) as (target, _), make_client(target) as client, pytest.raises(NotFound):
        list(client.watch_calibration("one"))


def test_the_callers_deadline_bounds_a_watch_whose_service_stays_away(make_client):
    with serving(Watched(STOPPING)) as (target, server), make_client(target) as client:
        watch = client.watch_calibration("one", timeout_s=1.0, on_lost=lambda _: server.stop(None))
        with pytest.raises((Unavailable, DeadlineExceeded)):
            list(watch)


def test_a_client_that_is_closed_loses_no_service():
    lost: list[NeapError] = []
    with serving(Watched(None, held=True)) as (target, _):
        with NeapClient(target) as client:
            watch = client.watch_calibration("one", on_lost=lost.append)
            next(watch)
        with pytest.raises((Unavailable, Cancelled)):
            next(watch)
    assert lost == []


def test_streams_that_end_at_once_are_opened_ever_more_slowly(monkeypatch):
    monkeypatch.setattr(retry, "MAX_BACKOFF_S", 2.0)
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    now_s = [0.0]
    monkeypatch.setattr(retry.time, "monotonic", lambda: now_s[0])
    lost: list[NeapError] = []
    attempts = retry.WatchAttempts(4, None, lost.append)

    def waits(lasted_s: float) -> float:
        attempts.open()
        attempts.note_message()
        now_s[0] += lasted_s
        return attempts.wait_s(STOPPING)

    assert [waits(0.0) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert waits(retry.STEADY_S + 1) == 0.1, "a long stream was no failed attempt"
    assert len(lost) == 2
    for _ in range(2000):
        waits(0.0)
