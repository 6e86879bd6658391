"""Sweeps and publications at once, killed, or standing still, in every pairing of a store and an index."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from shared.digests import digest_of
from shared.errors import Unavailable
from shared.registry import marks
from shared.registry.content_store import ContentStore
from shared.registry.factory import open_registry
from shared.registry.marks import PUBLICATIONS, SWEEPS, Mark, Side, sweeping
from shared.registry.registry import Registry
from shared.registry.store import Store
from shared.registry.sweep import Sweep
from tests.registry_damage import content_path
from tests.registry_servers import SERVERS, Steps, new_place
from tests.shared.registry.publisher import killed_at, publish_named

WEIGHTS = b"weights" * 100
STEPS_OF_A_SWEEP = ["sweep:marked", "sweep:read", "sweep:removed"]


@pytest.fixture(params=["folder", "bucket", SERVERS[0]])
def place(request: pytest.FixtureRequest) -> str:
    """One Redis is enough here: the contract shows that all are alike."""
    return new_place(request.param, request)


@pytest.fixture
def store(registry: Registry) -> Store:
    return registry._store


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "PUBLICATIONS_WAIT_S", 0.0)
    monkeypatch.setattr(marks, "POLL_S", 0.02)


def publish(registry: Registry, data: bytes = WEIGHTS, request_id: str = "one") -> int:
    return registry.publish("acme/tiny", {"a": 1}, {"x": data}, request_id=request_id).version


def check_whole(registry: Registry, version: int, data: bytes = WEIGHTS) -> None:
    assert registry.read_blob(registry.get("acme/tiny", version), "x") == data
    assert registry.list_versions("acme/tiny")[0].damage == ""


def leave_unused(store: Store) -> None:
    """What a publication of WEIGHTS finds there, and does not write again."""
    ContentStore(store).put("blobs", WEIGHTS)


@contextmanager
def later(side: Side) -> Iterator[None]:
    """The store's clock is that of a time when marks of this side count no longer."""
    now_s = Mark.now_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mark, "now_s", lambda mark: now_s(mark) + side.lasts_s + 1)
        yield


def refusal(call: Callable[[], object]) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        call()
    return caught.value


def test_while_a_sweep_runs_nothing_is_published_and_all_else_goes_on(registry, store, open_again):
    assert publish(registry) == 1
    other = open_again()
    began_s = time.time()
    with sweeping(store):
        refused = refusal(lambda: publish(other, b"other", "two"))
        assert refused.reason == "SWEEP_RUNNING"
        since, until = (datetime.fromisoformat(refused.metadata[name]) for name in ("since", "until"))
        assert since.tzinfo == UTC
        assert abs(since.timestamp() - began_s) < 30
        assert (until - since).total_seconds() == SWEEPS.lasts_s
        assert refused.metadata["until"] in refused.message
        assert refusal(other.check_writable).reason == "SWEEP_RUNNING"
        other.set_alias("acme/tiny", "stable", 1)
        assert other.resolve("acme/tiny", "stable").version == 1
        assert [version.version for version in other.list_versions("acme/tiny")] == [1]
    assert publish(other, b"other", "two") == 2
    other.check_writable()
    assert [*store.objects("sweeps"), *store.objects("publications")] == []


def test_a_sweep_does_not_begin_while_something_is_published(place, store, registry):
    leave_unused(store)
    steps = Steps()
    publisher, seen = open_registry(place, step=steps), []
    steps.at("claimed", lambda: seen.append(refusal(lambda: registry.sweep(grace_s=0))))
    assert publish(publisher) == 1
    assert seen[0].reason == "PUBLICATION_RUNNING"
    assert datetime.fromisoformat(seen[0].metadata["since"]).tzinfo == UTC
    assert seen[0].metadata["until"] in seen[0].message
    check_whole(registry, 1)
    assert registry.sweep(grace_s=0) == Sweep(2, 0, 0, 0)
    publisher.close()


def test_a_sweep_waits_for_a_publication_to_end(place, store, registry, monkeypatch):
    monkeypatch.setattr(marks, "PUBLICATIONS_WAIT_S", 60.0)
    leave_unused(store)
    steps, found = Steps(), []
    sweeper = threading.Thread(target=lambda: found.append(registry.sweep(grace_s=0)))

    def sweep_beside() -> None:
        sweeper.start()
        while not list(store.objects("sweeps")):
            time.sleep(0.01)
        assert found == []

    steps.at("claimed", sweep_beside)
    with closing(open_registry(place, step=steps)) as publisher:
        assert publish(publisher) == 1
    sweeper.join(60)
    assert found == [Sweep(2, 0, 0, 0)]


@pytest.mark.parametrize("step", STEPS_OF_A_SWEEP)
def test_after_the_time_of_a_killed_sweep_publications_and_sweeps_go_on(place, registry, store, step):
    assert publish(registry) == 1
    ContentStore(store).put("blobs", b"left over")
    ContentStore(store).put("blobs", b"and this")
    killed_at(place, step, "")
    assert refusal(lambda: publish(registry, b"and this", "two")).reason == "SWEEP_RUNNING"
    with later(SWEEPS):
        assert publish(registry, b"and this", "two") == 2
    assert list(store.objects("sweeps")) == []
    check_whole(registry, 2, b"and this")
    found = registry.sweep(grace_s=0)
    assert found.num_in_use == 4
    assert found.num_removed <= 1
    check_whole(registry, 1)
    assert len(list(store.objects("blobs/sha256"))) == 2


@pytest.mark.parametrize("step", STEPS_OF_A_SWEEP)
def test_a_sweep_finishes_what_a_killed_one_has_begun(place, registry, store, step):
    assert publish(registry) == 1
    for number in range(3):
        ContentStore(store).put("blobs", b"left over %d" % number)
    killed_at(place, step, "")
    registry.sweep(grace_s=0)
    assert len(list(store.objects("blobs/sha256"))) == 1
    check_whole(registry, 1)


def test_a_killed_publication_keeps_sweeps_waiting_for_a_stated_time(place, registry, store):
    killed_at(place, "claimed")
    refused = refusal(lambda: registry.sweep(grace_s=0))
    assert refused.reason == "PUBLICATION_RUNNING"
    since, until = (datetime.fromisoformat(refused.metadata[name]) for name in ("since", "until"))
    assert (until - since).total_seconds() == PUBLICATIONS.lasts_s
    assert len(list(store.objects("blobs/sha256"))) == 2
    with later(PUBLICATIONS):
        assert registry.sweep(grace_s=0).num_removed == 3
    assert publish_named(registry, "one-0") == 1
    assert registry.sweep(grace_s=0) == Sweep(3, 0, 0, 0)


@pytest.mark.parametrize("step", STEPS_OF_A_SWEEP)
def test_a_sweep_that_stood_still_removes_nothing_of_what_was_published_meanwhile(place, registry, store, step):
    """The second object is that of the publication, if one has been removed before."""
    leave_unused(store)
    ContentStore(store).put("blobs", b"left over")
    steps = Steps()

    def publish_meanwhile() -> None:
        with later(SWEEPS):
            assert publish(registry) == 1
            assert publish(registry, b"left over", "two") == 2

    steps.at(step, publish_meanwhile)
    with closing(open_registry(place, step=steps)) as sweeper:
        assert refusal(lambda: sweeper.sweep(grace_s=0)).reason == "SWEEP_TOO_SLOW"
    check_whole(registry, 1)
    check_whole(registry, 2, b"left over")
    assert registry.sweep(grace_s=0) == Sweep(4, 0, 0, 0)


def sweep_now(registry: Registry) -> None:
    with later(PUBLICATIONS):
        assert registry.sweep(grace_s=0).num_removed == 2


@pytest.mark.parametrize("step", ["verified:manifests", "claimed"])
def test_a_publication_that_stood_still_until_it_was_swept_records_nothing(place, registry, step):
    steps = Steps()
    steps.at(step, lambda: sweep_now(registry))
    with closing(open_registry(place, step=steps)) as publisher:
        assert refusal(lambda: publish(publisher)).reason == "PUBLICATION_TOO_SLOW"
        assert publisher.list_versions("acme/tiny") == []
        assert publish(publisher) == 1
        check_whole(publisher, 1)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_publication_that_stood_still_at_its_record_is_acknowledged_when_its_contents_are_back(
    place, registry, monkeypatch, is_killed
):
    """It has looked for its mark just before."""
    steps, elapsed_s = Steps(), marks.elapsed_s

    def stand_still() -> None:
        sweep_now(registry)
        monkeypatch.setattr(marks, "elapsed_s", lambda: elapsed_s() + PUBLICATIONS.lasts_s)

    def at(name: str) -> None:
        steps(name)
        if is_killed and name == "journal:written":
            raise KeyboardInterrupt

    steps.at("journal:begin", stand_still)
    with closing(open_registry(place, step=at)) as publisher:
        if is_killed:
            with pytest.raises(KeyboardInterrupt):
                publish(publisher)
        else:
            assert refusal(lambda: publish(publisher)).reason == "PUBLICATION_TOO_SLOW"
    monkeypatch.undo()
    with closing(open_registry(place)) as again:
        assert publish(again) == 1
        check_whole(again, 1)


def test_a_look_for_the_mark_during_which_the_process_stood_still_is_repeated(store, monkeypatch):
    exists, elapsed_s, looks = type(store).exists, marks.elapsed_s, []

    def exists_until_it_is_read(store: Any, path: str) -> bool:
        found = exists(store, path)
        if not looks:
            store.remove(path)
            monkeypatch.setattr(marks, "elapsed_s", lambda: elapsed_s() + SWEEPS.lasts_s)
        looks.append(found)
        return found

    with sweeping(store) as mark:
        monkeypatch.setattr(type(store), "exists", exists_until_it_is_read)
        assert refusal(mark.check).reason == "SWEEP_TOO_SLOW"
    assert looks == [True, False]


def test_a_mark_is_removed_also_if_the_store_answers_later(registry, store, monkeypatch):
    remove, num_failed = type(store).remove, 0

    def failing(store: Any, path: str) -> None:
        nonlocal num_failed
        num_failed += 1
        if num_failed % 2:
            raise Unavailable("does not answer")
        remove(store, path)

    monkeypatch.setattr(type(store), "remove", failing)
    assert publish(registry) == 1
    assert list(store.objects("publications")) == []
    assert registry.sweep() == Sweep(2, 0, 0, 0)
    assert list(store.objects("sweeps")) == []


def test_no_acknowledged_publication_is_lost_to_sweeps_beside_it(place, registry, monkeypatch):
    """The publishers share contents, which are there, unused, before each publication."""
    monkeypatch.setattr(marks, "PUBLICATIONS_WAIT_S", 60.0)
    acknowledged: dict[int, bytes] = {}
    is_over = threading.Event()

    def publish_all(name: str) -> None:
        with closing(open_registry(place)) as publisher:
            for number in range(6):
                data = b"contents %d" % number
                while True:
                    # As by a publisher that died.
                    publisher._store.create(content_path("blobs", digest_of(data)), data)
                    with suppress(Unavailable):
                        acknowledged[publish(publisher, data, f"{name}-{number}")] = data
                        break
                    time.sleep(0.02)

    def sweep_all() -> None:
        with closing(open_registry(place)) as sweeper:
            while not is_over.is_set():
                with suppress(Unavailable):
                    sweeper.sweep(grace_s=0)
                time.sleep(0.05)

    publishers = [threading.Thread(target=publish_all, args=(name,)) for name in "abc"]
    sweeper = threading.Thread(target=sweep_all)
    for thread in (*publishers, sweeper):
        thread.start()
    for thread in publishers:
        thread.join(120)
    is_over.set()
    sweeper.join(60)
    assert sorted(acknowledged) == list(range(1, 19))
    for version, data in acknowledged.items():
        assert registry.read_blob(registry.get("acme/tiny", version), "x") == data
