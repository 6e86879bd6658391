"""Leases and notes in a folder and a bucket: of several processes one acts, whatever any of them does meanwhile."""

import threading

import pytest

from shared.errors import Corrupt, InvalidInput
from shared.registry import lease as module
from shared.registry.lease import Lease
from shared.registry.registry import Registry
from tests.registry_servers import new_place


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest) -> str:
    return new_place(request.param, request)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(module, "elapsed_s", moved)
    return moved


def lease(registry: Registry) -> Lease:
    return registry.lease("judge")


def test_one_holds_it_until_it_has_not_renewed_it_for_its_term(registry, clock):
    first, second = lease(registry), lease(registry)
    assert first.hold()
    for _ in range(10):
        clock.now_s += first.renew_after_s
        assert first.hold()
        assert not second.hold()
    clock.now_s += 29.0
    assert first.is_held
    assert not second.hold()
    clock.now_s += 2.0
    assert not first.is_held
    assert second.hold()  # it has seen the last term for longer than that lasts
    assert not first.hold()
    assert (first.is_held, second.is_held) == (False, True)


def test_a_new_process_waits_a_whole_term_from_when_it_first_looked(registry, clock):
    assert lease(registry).hold()
    clock.now_s += 1000.0
    late = lease(registry)
    assert not late.hold()  # by whichever clock the first one goes, it may have renewed it just now
    clock.now_s += 31.0
    assert late.hold()


def test_it_is_handed_over_at_once(registry, clock):
    first, second = lease(registry), lease(registry)
    assert first.hold()
    first.give_up()
    assert not first.is_held
    assert second.hold()
    first.give_up()  # of one that does not hold it nothing is taken
    assert second.hold()


def test_of_many_that_ask_at_once_one_gets_it(open_again):
    leases = [lease(open_again()) for _ in range(8)]
    start, held = threading.Barrier(len(leases)), []

    def ask(one: Lease) -> None:
        start.wait()
        if one.hold():
            held.append(one)

    threads = [threading.Thread(target=ask, args=(one,)) for one in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) <= 1
    assert sum(one.is_held for one in leases) == len(held)


def test_a_term_that_was_removed_since_it_was_listed_is_not_taken_again(registry, clock, monkeypatch):
    """A process that stood still after it listed the terms creates one that there was already."""
    first, slow = lease(registry), lease(registry)
    assert first.hold()
    assert not slow.hold()
    clock.now_s += 31.0
    names = registry._store.names
    stale = names("leases/judge")
    for _ in range(3):
        assert first.hold()
    answers = [stale]
    monkeypatch.setattr(registry._store, "names", lambda folder: answers.pop() if answers else names(folder))
    assert not slow.hold()
    assert first.hold()


def test_a_damaged_term_ends_like_any_other(registry, clock, harm):
    assert lease(registry).hold()
    harm(f"leases/judge/{1:020}", "flip")
    second = lease(registry)
    with pytest.raises(Corrupt):
        second.hold()
    clock.now_s += 31.0
    assert second.hold()


def test_notes(registry, open_again, harm):
    assert registry.note("judge") is None
    registry.keep_note("judge", {"a": [1, 2.5]})
    registry.keep_note("judge", {"a": [3]})
    assert open_again().note("judge") == {"a": [3]}
    for name in ("../x", "A", "", "x" * 65):
        with pytest.raises(InvalidInput):
            registry.note(name)
        with pytest.raises(InvalidInput):
            registry.lease(name)
    harm("notes/judge.json", "truncate")
    with pytest.raises(Corrupt):
        registry.note("judge")
