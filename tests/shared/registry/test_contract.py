"""The interface of every registry backend (shared/registry/base.py)."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shared.errors import AlreadyExists, Conflict, InvalidInput, NotFound, PreconditionFailed
from shared.registry import index_keeper
from shared.registry.base import AliasChange, Canary, PublishedVersion
from shared.registry.registry import Registry
from tests.manifests import real_manifest
from tests.reasons import raises

MODEL = "acme/tiny-llama"
MANIFEST = {**real_manifest(), "note": "naïve"}
# What is refused before a store or an index is asked.
REFUSED_BY_ALL = pytest.mark.parametrize("place", ["folder"], indirect=True)


def publish(registry: Registry, request_id: str, **options: Any) -> PublishedVersion:
    blobs = options.pop("blobs", {"ladder.safetensors": request_id.encode() * 100})
    return registry.publish(
        options.pop("model_id", MODEL), options.pop("manifest", MANIFEST), blobs, request_id=request_id, **options
    )


def test_another_client_reads_what_was_published(registry: Registry, open_again: Callable[[], Registry]) -> None:
    made = publish(registry, "one", blobs={"a.bin": b"alpha", "b.bin": b""})
    other = open_again()
    assert other.get(MODEL, 1) == made == other.resolve(MODEL, "latest")
    assert made.version == 1
    assert made.size_bytes == 5
    assert abs(made.create_time_s - time.time()) < 60
    assert {key: made.manifest[key] for key in MANIFEST} == MANIFEST
    assert made.manifest["blobs"]["a.bin"] == {
        "digest": "sha256:8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8",
        "size_bytes": 5,
    }
    assert other.read_blob(made, "a.bin") == b"alpha"
    assert other.read_blob(made, "b.bin") == b""


def test_manifest_digest_does_not_depend_on_key_order(registry: Registry) -> None:
    first = publish(registry, "one", manifest={"a": 1, "b": [1.5]}, blobs={"x": b"1"})
    second = publish(registry, "two", manifest={"b": [1.5], "a": 1}, blobs={"x": b"1"})
    third = publish(registry, "three", manifest={"b": [1.5], "a": 2}, blobs={"x": b"1"})
    assert first.manifest_digest == second.manifest_digest != third.manifest_digest
    assert (first.version, second.version, third.version) == (1, 2, 3)


def test_each_model_numbers_its_versions_from_1(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert publish(registry, "one").version == 1
    assert publish(registry, "two", model_id="other").version == 1
    assert publish(registry, "three").version == 2
    assert [v.version for v in registry.list_versions(MODEL)] == [2, 1]
    monkeypatch.setattr(index_keeper, "MAX_MODELS_NOTED", 8)
    assert [registry.list_versions(f"unknown-{number}") for number in range(20)] == [[]] * 20
    assert len(registry._keeper._looked_at_s) <= 8, "clients may ask for any name, so few are kept"


def test_versions_are_listed_in_pages_newest_first(registry: Registry) -> None:
    for number in range(5):
        publish(registry, f"request-{number}")
    assert [v.version for v in registry.list_versions(MODEL, limit=2)] == [5, 4]
    assert [v.version for v in registry.list_versions(MODEL, before=4, limit=2)] == [3, 2]
    assert registry.list_versions(MODEL, before=1) == []
    with pytest.raises(InvalidInput):
        registry.list_versions(MODEL, limit=0)


def test_a_repeated_request_publishes_once_and_moves_aliases_once(registry: Registry) -> None:
    first = publish(registry, "one", blobs={"x": b"1"})
    second = publish(registry, "two", blobs={"x": b"2"})
    assert publish(registry, "one", blobs={"x": b"1"}) == first
    assert registry.resolve(MODEL, "latest") == second
    assert len(registry.list_versions(MODEL)) == 2


def test_a_publication_is_found_by_its_request(registry: Registry) -> None:
    assert registry.find_publication(MODEL, "one") is None
    made = publish(registry, "one")
    publish(registry, "two", blobs={"x": b"2"})
    assert registry.find_publication(MODEL, "one") == made
    assert registry.find_publication(MODEL, "three") is None
    assert registry.find_publication("other", "one") is None


@pytest.mark.parametrize("other", [{"blobs": {"x": b"2"}}, {"manifest": {"a": 2}}, {"model_id": "other"}])
def test_a_repeated_request_with_other_contents_is_refused(registry: Registry, other: dict[str, Any]) -> None:
    publish(registry, "one", blobs={"x": b"1"})
    with pytest.raises(AlreadyExists) as raised:
        publish(registry, "one", **{"blobs": {"x": b"1"}, **other})
    assert raised.value.metadata == {"model_id": MODEL, "version": "1"}
    assert len(registry.list_versions(MODEL)) == 1


@REFUSED_BY_ALL
@pytest.mark.parametrize(
    "model_id", ["", "..", "../up", "a/../b", "/a", "a/", "a//b", ".hidden", "a\n", "a b", "a\x00", "x" * 201]
)
def test_invalid_model_ids_are_refused(registry: Registry, model_id: str) -> None:
    for call in (
        lambda: publish(registry, "one", model_id=model_id),
        lambda: registry.get(model_id, 1),
        lambda: registry.list_versions(model_id),
        lambda: registry.aliases(model_id),
        lambda: registry.resolve(model_id, "latest"),
        lambda: list(registry.events(model_id)),
    ):
        with raises(InvalidInput, "BAD_MODEL_ID"):
            call()


@REFUSED_BY_ALL
@pytest.mark.parametrize(
    "alias", ["", "Upper", "a/b", "..", "12", "x" * 65, "é", "a\n", "@a", "a@", "12@a", "a@b@c", "a@B"]
)
def test_invalid_aliases_are_refused(registry: Registry, alias: str) -> None:
    publish(registry, "one")
    for call in (
        lambda: publish(registry, "two", aliases=[alias]),
        lambda: registry.set_alias(MODEL, alias, 1),
        lambda: registry.resolve(MODEL, alias),
    ):
        with raises(InvalidInput, "BAD_ALIAS"):
            call()
    assert registry.aliases(MODEL) == {"latest": 1}


@REFUSED_BY_ALL
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"blobs": {"../x": b"1"}}, "BAD_BLOB_NAME"),
        ({"blobs": {"a/b": b"1"}}, "BAD_BLOB_NAME"),
        ({"blobs": {}}, "BAD_BLOBS"),
        ({"manifest": {"blobs": {}}}, "BAD_MANIFEST"),
        ({"manifest": {"a": float("nan")}}, "BAD_MANIFEST"),
        ({"manifest": {"a": {1: 2}}}, "BAD_MANIFEST"),
        ({"manifest": {"a": b"bytes"}}, "BAD_MANIFEST"),
        ({"manifest": {"a": "\ud800"}}, "BAD_MANIFEST"),
        ({"manifest": {"a": "x" * (2 << 20)}}, "MANIFEST_TOO_LARGE"),
        ({"actor": "x" * 2001}, "NOTE_TOO_LONG"),
    ],
)
def test_invalid_publications_are_refused(registry: Registry, options: dict[str, Any], reason: str) -> None:
    with raises(InvalidInput, reason):
        publish(registry, "one", **options)
    assert registry.list_versions(MODEL) == []


@REFUSED_BY_ALL
@pytest.mark.parametrize("text", ["a\x1b]0;b", "a\u202eb"])
def test_actor_and_reason_may_not_contain_control_characters(registry: Registry, text: str) -> None:
    publish(registry, "one")
    publish(registry, "two")
    for call in (
        lambda **note: publish(registry, "three", actor=note["actor"] + note["reason"]),
        lambda **note: registry.set_alias(MODEL, "stable", 1, **note),
        lambda **note: registry.set_canary(MODEL, "latest", Canary(1, 10), **note),
        lambda **note: registry.set_canary(MODEL, "latest", None, **note),
        lambda **note: registry.promote_canary(MODEL, "latest", **note),
        lambda **note: registry.rollback_alias(MODEL, "latest", **note),
    ):
        for note in ({"actor": text, "reason": ""}, {"actor": "", "reason": text}):
            with raises(InvalidInput, "BAD_NOTE"):
                call(**note)
    assert registry.aliases(MODEL) == {"latest": 2}


@REFUSED_BY_ALL
@pytest.mark.parametrize("request_id", ["", "x" * 129, "a\nb", "a\x1bb", "a\u202eb"])
def test_invalid_request_ids_are_refused(registry: Registry, request_id: str) -> None:
    with pytest.raises(InvalidInput):
        publish(registry, request_id, blobs={"x": b"1"})


def test_the_error_names_an_unknown_version_alias_or_blob(registry: Registry) -> None:
    made = publish(registry, "one", aliases=["stable", "latest"])
    for version in (0, -1, 2, 2**70):
        with pytest.raises(NotFound, match="no router version"):
            registry.get(MODEL, version)
    with pytest.raises(NotFound, match="latest, stable") as raised:
        registry.resolve(MODEL, "canary")
    assert raised.value.metadata["aliases"] == "latest, stable"
    with pytest.raises(NotFound, match=r"nothing\.bin"):
        registry.read_blob(made, "nothing.bin")
    for call in (registry.alias_history, registry.rollback_alias):
        with pytest.raises(NotFound):
            call(MODEL, "canary")


def test_set_alias_is_a_compare_and_swap(registry: Registry) -> None:
    publish(registry, "one")
    publish(registry, "two")
    change = registry.set_alias(MODEL, "stable", 1, expected_version=0, actor="ann", reason="trial ended")
    assert (change.from_version, change.to_version, change.actor) == (None, 1, "ann")
    with pytest.raises(Conflict) as raised:
        registry.set_alias(MODEL, "stable", 2, expected_version=0)
    assert raised.value.metadata == {"current_version": "1"}
    with pytest.raises(Conflict):
        registry.set_alias(MODEL, "stable", 1, expected_version=2)
    assert registry.set_alias(MODEL, "stable", 2, expected_version=1).from_version == 1
    with pytest.raises(NotFound):
        registry.set_alias(MODEL, "stable", 3)
    assert registry.aliases(MODEL) == {"latest": 2, "stable": 2}
    assert [(c.from_version, c.to_version) for c in registry.alias_history(MODEL, "stable")] == [(1, 2), (None, 1)]


def test_setting_an_alias_to_its_own_version_records_no_change(registry: Registry) -> None:
    publish(registry, "one", aliases=["stable"])
    publish(registry, "two", aliases=["stable"])
    assert registry.set_alias(MODEL, "stable", 2).from_version == 1
    assert registry.rollback_alias(MODEL, "stable").to_version == 1


def test_rollback_returns_to_the_version_before(registry: Registry) -> None:
    publish(registry, "one", aliases=["stable"])
    with raises(PreconditionFailed, "NO_EARLIER_VERSION"):
        registry.rollback_alias(MODEL, "stable")
    publish(registry, "two", aliases=["stable"])
    back = registry.rollback_alias(MODEL, "stable", actor="bob", reason="worse")
    assert (back.from_version, back.to_version, back.reason) == (2, 1, "worse")
    assert registry.resolve(MODEL, "stable").version == 1
    assert registry.rollback_alias(MODEL, "stable").to_version == 2
    assert len(registry.alias_history(MODEL, "stable")) == 4


def test_events_are_all_publications_and_alias_changes_in_order(registry: Registry) -> None:
    first = publish(registry, "one")
    publish(registry, "elsewhere", model_id="other")
    moved = registry.set_alias(MODEL, "stable", 1)
    events = list(registry.events(MODEL))
    assert [event.change for event in events] == [first, registry.alias_history(MODEL, "latest")[0], moved]
    numbers = [event.event for event in events]
    assert numbers == sorted(set(numbers))
    assert list(registry.events(MODEL, after_event=numbers[1])) == events[2:]
    assert list(registry.events(MODEL, after_event=numbers[-1])) == []


def test_events_continue_after_a_full_page(registry: Registry) -> None:
    publish(registry, "one")
    publish(registry, "two")
    for number in range(130):
        registry.set_alias(MODEL, "stable", 1 + number % 2)
    changes = [event.change for event in registry.events(MODEL)]
    assert sum(isinstance(change, AliasChange) for change in changes) == 132


def test_events_wait_for_another_client(registry: Registry, open_again: Callable[[], Registry]) -> None:
    started_s = time.monotonic()
    assert list(registry.events(MODEL, timeout_s=0.2)) == []
    assert time.monotonic() - started_s >= 0.2
    publisher = open_again()
    timer = threading.Timer(0.2, lambda: publish(publisher, "one"))
    timer.start()
    event = next(registry.events(MODEL, timeout_s=20.0))
    timer.join()
    assert isinstance(event.change, PublishedVersion)


def test_several_threads_publish_through_one_client(registry: Registry) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: publish(registry, f"request-{number}"), range(8)))
    assert [v.version for v in registry.list_versions(MODEL)] == list(range(8, 0, -1))
