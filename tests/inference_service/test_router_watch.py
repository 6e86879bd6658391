"""A watch reports publications and alias moves, also those during an outage of the registry."""

import itertools
import threading
from contextlib import closing

import pytest
import structlog

from inference_service.router_watch import RouterWatch
from shared.errors import Unavailable
from shared.registry.factory import open_registry
from tests.waiting import wait_until


class Watched:
    """A registry that can be away. Keeps the arguments of its `events` calls."""

    def __init__(self, registry) -> None:
        self.registry = registry
        self.is_away = False
        self.asked: list[int] = []
        self.waits_s: list[float] = []
        self.num_refused = 0

    def last_event(self, model_id):
        self._check()
        return self.registry.last_event(model_id)

    def events(self, model_id, *, after_event, timeout_s):
        self._check()
        self.asked.append(after_event)
        self.waits_s.append(timeout_s)
        return self.registry.events(model_id, after_event=after_event, timeout_s=timeout_s)

    def _check(self):
        if self.is_away:
            self.num_refused += 1
            raise Unavailable("away")


@pytest.fixture
def registry(tmp_path):
    with closing(open_registry(str(tmp_path / "registry"))) as registry:
        yield Watched(registry)


@pytest.fixture
def watch(registry):
    watches = []

    def begin(on_change, **options):
        options = {"watch_s": 0.05, "pause_s": 0.02, "poll_s": 1000.0, **options}
        watches.append(RouterWatch(registry, "tiny", on_change, **options))
        return watches[-1]

    yield begin
    for watch in watches:
        watch.stop()


def publish(registry, number):
    registry.registry.publish("tiny", {"n": number}, {"x": b""}, request_id=str(number))


def test_events_before_its_start_are_ignored(registry, watch):
    publish(registry, 1)
    changed = threading.Semaphore(0)
    watch(changed.release)
    wait_until(lambda: len(registry.asked) > 2)
    assert not changed.acquire(blocking=False)
    publish(registry, 2)
    assert changed.acquire(timeout=60)
    registry.registry.rollback_alias("tiny", "latest")
    assert changed.acquire(timeout=60)
    assert registry.asked == sorted(registry.asked)


def test_events_during_an_outage_are_not_missed(registry, watch):
    publish(registry, 1)
    changed = threading.Semaphore(0)
    watch(changed.release)
    wait_until(lambda: registry.asked)
    last = registry.registry.last_event("tiny")
    registry.is_away = True
    wait_until(lambda: registry.num_refused)
    asked = len(registry.asked)
    publish(registry, 2)
    wait_until(lambda: registry.num_refused > 2)
    assert not changed.acquire(blocking=False)
    registry.is_away = False
    assert changed.acquire(timeout=60)
    assert registry.asked[asked] == last, "it goes on from the last event it has seen"


def test_a_poll_beside_the_stream_at_times_that_differ(registry, watch):
    """By a clock that runs while the stream is waited for."""
    times: list[float] = []
    watch(lambda: times.append(sum(registry.waits_s)), poll_s=0.1, watch_s=0.002, clock=lambda: sum(registry.waits_s))
    wait_until(lambda: len(times) > 8)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert 0.05 <= min(pauses) <= max(pauses) <= 0.155
    assert max(pauses) - min(pauses) > 0.005


def test_a_poll_goes_on_while_the_stream_is_away(registry, watch):
    registry.is_away = True
    changed = threading.Semaphore(0)
    watch(changed.release, poll_s=0.05)
    for _ in range(3):
        assert changed.acquire(timeout=60)


@pytest.mark.parametrize("method", ["last_event", "events", "on_change"])
def test_the_watch_goes_on_after_an_unexpected_error(registry, watch, method):
    changed, reasons, faults = threading.Semaphore(0), [], ["a fault of ours"] * 3

    def failing(function):
        def call(*args, **kwargs):
            if faults:
                raise TypeError(faults.pop())
            return function(*args, **kwargs)

        return call

    publish(registry, 1)
    on_change = changed.release
    if method == "on_change":
        on_change = failing(on_change)
    else:
        setattr(registry, method, failing(getattr(registry, method)))
    with structlog.testing.capture_logs() as logs:
        watch(on_change, on_error=reasons.append, pause_s=0.001, poll_s=0.05)
        assert changed.acquire(timeout=60)
        wait_until(lambda: logs and logs[-1]["event"] == "routers are watched again")
    assert reasons == ["INTERNAL"] * 3
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["reason"] for entry in warnings[:1]] == ["INTERNAL"]
    assert warnings[0]["exc_info"], "the traceback of what nobody expected is logged"


def test_pauses_after_errors_grow_up_to_a_limit(registry, watch, monkeypatch):
    registry.is_away = True
    pauses, reasons = [], []
    begun = watch(lambda: None, on_error=reasons.append, pause_s=1.0)
    begun.stop()
    begun._thread.join(60)
    monkeypatch.setattr(begun._stopping, "is_set", lambda: len(pauses) > 6)
    monkeypatch.setattr(begun._stopping, "wait", pauses.append)
    begun._run()
    assert all(
        0.5 * expected <= pause <= 1.5 * expected for pause, expected in zip(pauses, [1, 2, 4, 8, 8, 8, 8], strict=True)
    )
    assert set(reasons) == {"UNAVAILABLE"}
