"""Canaries, checks and rollback in every registry backend (shared/registry/base.py)."""

import threading
from collections.abc import Callable

import pytest

from shared.errors import Conflict, InvalidInput, NotFound, PreconditionFailed
from shared.registry.base import AliasChange, Canary
from shared.registry.registry import Registry
from tests.reasons import raises

MODEL = "acme/tiny-llama"
PASSED = {"checks": {"unpacks": {"passed": True}}}
FAILED = {"checks": {"unpacks": {"passed": True}, "confidence": {"passed": False, "detail": "bad"}}}


def publish(registry: Registry, number: int, **manifest: object) -> int:
    blobs = {"x": str(number).encode()}
    return registry.publish(
        MODEL, {"number": number, **manifest}, blobs, request_id=f"request-{number}", aliases=()
    ).version


@pytest.fixture
def stable(registry: Registry) -> Registry:
    """A registry with the versions 1 to 3. The alias "stable" was moved from 1 to 2."""
    for number in (1, 2, 3):
        publish(registry, number)
    registry.set_alias(MODEL, "stable", 1)
    registry.set_alias(MODEL, "stable", 2)
    return registry


def moves(registry: Registry) -> list[tuple[int | None, int, Canary | None]]:
    history = registry.alias_history(MODEL, "stable")
    return [(change.from_version, change.to_version, change.canary) for change in history]


def test_other_clients_see_a_canary_and_the_alias_version_is_unchanged(
    stable: Registry, open_again: Callable[[], Registry]
) -> None:
    change = stable.set_canary(MODEL, "stable", Canary(3, 100), expected_version=2, actor="ann", reason="try")
    assert (change.from_version, change.to_version, change.canary) == (2, 2, Canary(3, 100))
    other = open_again()
    target = other.target(MODEL, "stable")
    assert (target.published.version, target.canary) == (2, Canary(3, 100))
    assert other.resolve(MODEL, "stable").version == 2
    assert other.aliases(MODEL) == {"stable": 2}
    assert other.canaries(MODEL) == {"stable": Canary(3, 100)}
    assert other.alias_history(MODEL, "stable")[0] == change
    assert (change.actor, change.reason) == ("ann", "try")
    *_, last = other.events(MODEL)
    assert (last.change, last.event) == (change, other.last_event(MODEL))


def test_a_canarys_share_can_change_and_setting_the_same_share_records_nothing(stable: Registry) -> None:
    first = stable.set_canary(MODEL, "stable", Canary(3, 10))
    assert stable.set_canary(MODEL, "stable", Canary(3, 10)) == first
    stable.set_canary(MODEL, "stable", Canary(3, 500))
    assert stable.canaries(MODEL) == {"stable": Canary(3, 500)}
    assert moves(stable)[:2] == [(2, 2, Canary(3, 500)), (2, 2, Canary(3, 10))]


def test_promotion_moves_the_alias_to_the_canary_and_one_rollback_undoes_it(stable: Registry) -> None:
    stable.set_canary(MODEL, "stable", Canary(3, 100))
    with raises(Conflict, "CANARY_MOVED"):
        stable.promote_canary(MODEL, "stable", expected_canary=1)
    change = stable.promote_canary(MODEL, "stable", expected_canary=3, actor="bob", reason="good")
    assert (change.from_version, change.to_version, change.canary) == (2, 3, None)
    assert stable.target(MODEL, "stable").published.version == 3
    assert stable.canaries(MODEL) == {}
    assert stable.rollback_alias(MODEL, "stable", actor="bob", reason="bad").to_version == 2
    assert stable.target(MODEL, "stable").canary is None, "a rollback does not restore the canary"


def test_a_rollback_ends_the_canary_and_the_next_returns_to_the_version_before(stable: Registry) -> None:
    stable.set_canary(MODEL, "stable", Canary(3, 10))
    stable.set_canary(MODEL, "stable", Canary(3, 100))
    ended = stable.rollback_alias(MODEL, "stable", expected_version=2)
    assert (ended.from_version, ended.to_version, ended.canary) == (2, 2, None)
    with pytest.raises(Conflict):
        stable.rollback_alias(MODEL, "stable", expected_version=3)
    back = stable.rollback_alias(MODEL, "stable", expected_version=2)
    assert (back.from_version, back.to_version) == (2, 1)


def test_an_alias_that_never_moved_cannot_be_rolled_back_beyond_its_canary(registry: Registry) -> None:
    publish(registry, 1)
    publish(registry, 2)
    registry.set_alias(MODEL, "stable", 1)
    registry.set_canary(MODEL, "stable", Canary(2, 1))
    assert registry.rollback_alias(MODEL, "stable").to_version == 1
    with raises(PreconditionFailed, "NO_EARLIER_VERSION"):
        registry.rollback_alias(MODEL, "stable")


def test_ending_a_canary_keeps_the_alias_version(stable: Registry) -> None:
    stable.set_canary(MODEL, "stable", Canary(3, 10))
    assert stable.set_canary(MODEL, "stable", None).to_version == 2
    for call in (lambda: stable.set_canary(MODEL, "stable", None), lambda: stable.promote_canary(MODEL, "stable")):
        with raises(PreconditionFailed, "NO_CANARY"):
            call()
    assert stable.aliases(MODEL) == {"stable": 2}


def test_moving_the_alias_ends_its_canary(stable: Registry) -> None:
    stable.set_canary(MODEL, "stable", Canary(3, 10))
    assert stable.set_alias(MODEL, "stable", 2).canary is None, "also if the alias names it already"
    stable.set_canary(MODEL, "stable", Canary(3, 10))
    blobs = {"x": b"4"}
    stable.publish(MODEL, {"number": 4}, blobs, request_id="request-4", aliases=["stable"])
    assert stable.canaries(MODEL) == {}
    assert stable.rollback_alias(MODEL, "stable").to_version == 2


def test_invalid_canaries_are_refused(stable: Registry) -> None:
    for canary, kind, reason in (
        (Canary(3, 0), InvalidInput, "BAD_SHARE"),
        (Canary(3, 1000), InvalidInput, "BAD_SHARE"),
        (Canary(2, 10), InvalidInput, "BAD_CANARY"),
        (Canary(4, 10), NotFound, "ROUTER_VERSION_NOT_FOUND"),
    ):
        with raises(kind, reason):
            stable.set_canary(MODEL, "stable", canary)
    with pytest.raises(Conflict):
        stable.set_canary(MODEL, "stable", Canary(3, 10), expected_version=1)
    for call in (
        lambda: stable.set_canary(MODEL, "none", Canary(3, 10)),
        lambda: stable.promote_canary(MODEL, "none"),
        lambda: stable.target(MODEL, "none"),
    ):
        with pytest.raises(NotFound, match="stable"):
            call()
    assert stable.canaries(MODEL) == {}


def test_no_alias_is_set_to_a_version_with_a_failed_check(registry: Registry) -> None:
    publish(registry, 1, **PASSED)
    registry.set_alias(MODEL, "stable", 1)
    publish(registry, 2, **FAILED)
    for call in (
        lambda: registry.set_alias(MODEL, "stable", 2),
        lambda: registry.set_alias(MODEL, "new", 2),
        lambda: registry.set_canary(MODEL, "stable", Canary(2, 10)),
        lambda: registry.publish(MODEL, FAILED, {"x": b""}, request_id="r", aliases=["stable"]),
    ):
        with pytest.raises(PreconditionFailed) as raised:
            call()
        assert (raised.value.reason, raised.value.metadata) == ("CHECKS_FAILED", {"failed": "confidence"})
    assert registry.aliases(MODEL) == {"stable": 1}
    assert len(registry.list_versions(MODEL)) == 2


def test_of_concurrent_compare_and_swaps_one_succeeds(stable: Registry, open_again: Callable[[], Registry]) -> None:
    won: list[AliasChange] = []
    lost: list[Conflict] = []

    def change(client: Registry, version: int) -> None:
        try:
            won.append(client.set_alias(MODEL, "stable", version, expected_version=2))
        except Conflict as error:
            lost.append(error)

    clients = [open_again() for _ in range(4)]
    threads = [
        threading.Thread(target=change, args=(client, 1 + 2 * (number % 2))) for number, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 3)
    assert moves(open_again())[0] == (2, won[0].to_version, None)


def test_last_event_is_the_number_of_the_newest_event(registry: Registry) -> None:
    assert registry.last_event(MODEL) == 0
    publish(registry, 1)
    registry.set_alias(MODEL, "stable", 1)
    seen = registry.last_event(MODEL)
    assert list(registry.events(MODEL, after_event=seen)) == []
    registry.set_alias(MODEL, "new", 1)
    assert [e.event for e in registry.events(MODEL, after_event=seen)] == [registry.last_event(MODEL)]
