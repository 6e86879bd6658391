"""Every pairing of a store and an index, if a manifest, a blob or a journal record is damaged."""

from collections.abc import Callable

import pytest
import structlog

from shared.errors import Corrupt
from shared.registry.base import AliasChange, Canary, PublishedVersion
from shared.registry.registry import Registry
from tests.reasons import raises
from tests.registry_damage import content_path

MODEL = "acme/tiny"


def publish(registry: Registry, number: int) -> PublishedVersion:
    blobs = {"x": str(number).encode() * 100}
    return registry.publish(MODEL, {"number": number}, blobs, request_id=f"request-{number}", aliases=["stable"])


@pytest.fixture
def broken(open_again: Callable[[], Registry], harm: Callable[[str, str], None]) -> Callable[[int, str], Registry]:
    """A client of a registry with versions 1 to 3, of which one manifest is damaged.
    "stable" was moved from each version to the next."""
    first = open_again()
    versions = [publish(first, number) for number in (1, 2, 3)]

    def damage(number: int, how: str = "truncate") -> Registry:
        harm(content_path("manifests", versions[number - 1].manifest_digest), how)
        return open_again()

    return damage


@pytest.mark.parametrize("how", ["truncate", "flip", "delete"])
def test_a_damaged_version_is_listed_as_damaged_with_the_intact_ones(broken, how):
    registry = broken(2, how)
    listed = registry.list_versions(MODEL)
    assert [version.version for version in listed] == [3, 2, 1]
    assert [bool(version.damage) for version in listed] == [False, True, False]
    assert [version.manifest.get("number") for version in listed] == [3, None, 1]
    damaged = listed[1]
    assert damaged.manifest_digest in damaged.damage
    assert damaged.size_bytes == 100
    assert [version.version for version in registry.list_versions(MODEL, before=3)] == [2, 1]
    with pytest.raises(Corrupt) as raised:
        registry.get(MODEL, 2)
    assert raised.value.metadata["expected_digest"] == damaged.manifest_digest


def test_history_rollback_and_events_work_without_the_damaged_manifest(broken):
    registry = broken(3)
    moves = [(c.from_version, c.to_version) for c in registry.alias_history(MODEL, "stable")]
    assert moves == [(2, 3), (1, 2), (None, 1)]
    assert registry.aliases(MODEL) == {"stable": 3}
    changes = [event.change for event in registry.events(MODEL)]
    published = [change for change in changes if isinstance(change, PublishedVersion)]
    assert [bool(version.damage) for version in published] == [False, False, True]
    assert sum(isinstance(change, AliasChange) for change in changes) == 3
    assert registry.last_event(MODEL) == list(registry.events(MODEL))[-1].event
    with pytest.raises(Corrupt):
        registry.resolve(MODEL, "stable")
    # A worker that holds the version in memory only has to learn that the alias has not moved.
    target = registry.target(MODEL, "stable").published
    assert (target.version, bool(target.damage)) == (3, True)
    assert registry.rollback_alias(MODEL, "stable").to_version == 2
    assert registry.resolve(MODEL, "stable").version == 2
    assert registry.read_blob(registry.get(MODEL, 1), "x") == b"1" * 100


def test_no_alias_is_set_to_a_damaged_version(broken):
    registry = broken(2)
    registry.set_canary(MODEL, "stable", Canary(1, 100))
    for refused in (
        lambda: registry.set_alias(MODEL, "stable", 2),
        lambda: registry.set_alias(MODEL, "other", 2),
        lambda: registry.set_canary(MODEL, "stable", Canary(2, 100)),
    ):
        with raises(Corrupt, "VERSION_DAMAGED", match=r"version 2 .*damaged") as raised:
            refused()
        assert raised.value.metadata["version"] == "2"
    assert registry.aliases(MODEL) == {"stable": 3}
    assert registry.rollback_alias(MODEL, "stable").canary is None, "ending a canary does not move the alias"
    with raises(Corrupt, "VERSION_DAMAGED"):
        registry.rollback_alias(MODEL, "stable")
    assert registry.set_alias(MODEL, "stable", 1).to_version == 1


def test_a_canary_whose_version_is_damaged_is_not_promoted(broken, open_again):
    open_again().set_canary(MODEL, "stable", Canary(2, 100))
    registry = broken(2)
    assert registry.target(MODEL, "stable").canary == Canary(2, 100)
    with raises(Corrupt, "VERSION_DAMAGED"):
        registry.promote_canary(MODEL, "stable")
    assert registry.aliases(MODEL) == {"stable": 3}


def test_a_client_that_has_read_the_manifest_before_notices_later_damage(registry, harm):
    made = publish(registry, 1)
    publish(registry, 2)
    registry.get(MODEL, 1)
    harm(content_path("manifests", made.manifest_digest), "flip")
    with raises(Corrupt, "VERSION_DAMAGED"):
        registry.set_alias(MODEL, "stable", 1)
    with pytest.raises(Corrupt):
        registry.rollback_alias(MODEL, "stable")


def test_publishing_still_works_and_the_same_contents_repair_the_manifest(broken):
    registry = broken(2)
    assert publish(registry, 4).version == 4
    again = registry.publish(MODEL, {"number": 2}, {"x": b"2" * 100}, request_id="again", aliases=())
    assert again.version == 5
    assert not any(version.damage for version in registry.list_versions(MODEL))
    assert registry.set_alias(MODEL, "stable", 2).to_version == 2


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_a_damaged_blob_is_reported_and_repaired_by_the_same_contents(registry, harm, how):
    made = publish(registry, 1)
    expected = made.manifest["blobs"]["x"]["digest"]
    harm(content_path("blobs", expected), how)
    with pytest.raises(Corrupt) as raised:
        registry.read_blob(made, "x")
    assert raised.value.metadata["expected_digest"] == expected
    assert raised.value.metadata["actual_digest"] != expected
    registry.publish(MODEL, {"number": 2}, {"x": b"1" * 100}, request_id="again")
    assert registry.read_blob(made, "x") == b"1" * 100


RECORD = "models/acme!tiny/journal/00000000000000000002.json"


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_a_damaged_record_stops_new_clients_without_an_index_and_nobody_else(place, registry, open_again, harm, how):
    for number in (1, 2, 3):
        publish(registry, number)
    before = registry.list_versions(MODEL)
    harm(RECORD, how)
    other = open_again()
    if place.startswith("redis"):
        assert other.list_versions(MODEL) == before, "the index still has what the record said"
        with pytest.raises(Corrupt):
            other.rebuild(MODEL)
    else:
        for call in (other.list_versions, other.aliases, lambda _: publish(other, 4)):
            with pytest.raises(Corrupt) as raised:
                call(MODEL)
        assert how != "delete" or raised.value.reason == "JOURNAL_INCOMPLETE"
    assert other.publish("other", {}, {"x": b"1"}, request_id="elsewhere").version == 1
    assert registry.list_versions(MODEL) == before
    assert publish(registry, 5).version == 4


def test_a_record_damaged_before_it_was_read_stops_writers_but_not_readers(place, registry, open_again, harm):
    publish(registry, 1)
    other = open_again()
    assert other.aliases(MODEL) == {"stable": 1}
    registry._index.advance = lambda model_id, step: step.state.applied  # it dies before this
    publish(registry, 2)
    harm(RECORD, "truncate")
    with structlog.testing.capture_logs() as logs:
        other._keeper._looked_at_s.clear()
        for _ in range(20):
            assert other.resolve(MODEL, "stable").version == 1
    assert [line["log_level"] for line in logs] == ["error"], "one line, not one a request"
    assert [version.version for version in other.list_versions(MODEL)] == [1]
    with pytest.raises(Corrupt):
        other.set_alias(MODEL, "other", 1)
    assert other.publish("other", {}, {"x": b"1"}, request_id="other").version == 1


def test_objects_are_never_overwritten(registry, harm):
    publish(registry, 1)
    store = registry._store

    def times() -> dict[str, float]:
        folders = ("blobs", "manifests", "models", "requests")
        return {o.name: o.last_modified_s for folder in folders for o in store.objects(folder)}

    written = times()
    publish(registry, 2)
    registry.publish(MODEL, {"number": 1}, {"x": b"1" * 100}, request_id="again")
    registry.set_alias(MODEL, "other", 1)
    assert {name: when for name, when in times().items() if name in written} == written
