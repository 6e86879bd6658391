"""Sweeps, in every pairing of a store and an index."""

import pytest

from shared.digests import digest_of
from shared.errors import Corrupt, InvalidInput
from shared.registry.content_store import ContentStore
from shared.registry.registry import Registry
from shared.registry.store import Store
from shared.registry.sweep import Sweep, sweep
from tests.registry_damage import content_path

WEIGHTS = b"weights" * 100


@pytest.fixture
def store(registry: Registry) -> Store:
    return registry._store


@pytest.fixture
def contents(store: Store) -> ContentStore:
    return ContentStore(store)


def publish(registry: Registry, data: bytes = WEIGHTS, request_id: str = "one"):
    return registry.publish("acme/tiny", {"a": 1}, {"x": data}, request_id=request_id)


def test_unused_objects_are_removed_and_used_ones_kept(registry, store, contents):
    version = publish(registry)
    contents.put("blobs", b"left over")
    contents.put("manifests", b"{}")
    rehearsed = sweep(store, grace_s=0, is_rehearsal=True)
    assert rehearsed == Sweep(num_in_use=2, num_removed=2, num_removed_bytes=11, num_in_grace_period=0)
    assert contents.read("blobs", digest_of(b"left over")) == b"left over"
    assert sweep(store, grace_s=0) == rehearsed
    assert registry.read_blob(version, "x") == WEIGHTS
    assert not contents.has("blobs", digest_of(b"left over"))
    assert not contents.has("manifests", digest_of(b"{}"))
    assert sweep(store, grace_s=0) == Sweep(2, 0, 0, 0)
    assert [*store.objects("sweeps"), *store.objects("publications")] == []


def test_objects_within_the_grace_period_are_kept(registry, store, contents):
    publish(registry)
    contents.put("blobs", b"left over")
    assert sweep(store, grace_s=3600) == Sweep(2, 0, 0, 1)
    assert contents.has("blobs", digest_of(b"left over"))
    with pytest.raises(InvalidInput):
        sweep(store, grace_s=-1)


def test_nothing_is_removed_if_a_record_cannot_be_read(registry, store, contents, harm):
    publish(registry)
    contents.put("blobs", b"left over")
    path = f"models/acme!tiny/journal/{1:020d}.json"
    harm(path, "truncate")
    with pytest.raises(Corrupt):
        sweep(store, grace_s=0)
    assert contents.has("blobs", digest_of(b"left over"))
    assert [*store.objects("sweeps"), *store.objects("publications")] == []


def test_no_blob_is_removed_if_a_manifest_is_damaged(registry, store, contents, harm):
    version = publish(registry)
    publish(registry, b"other", "two")
    contents.put("blobs", b"left over")
    contents.put("manifests", b"{}")
    harm(content_path("manifests", version.manifest_digest), "truncate")
    found = sweep(store, grace_s=0)
    assert (found.num_removed, found.num_damaged) == (1, 1), "the manifest that no journal names"
    assert found.num_kept == 2
    assert contents.has("blobs", digest_of(WEIGHTS))
    assert publish(registry, WEIGHTS, "again").version == 3, "the same contents repair it"
    assert sweep(store, grace_s=0) == Sweep(4, 1, 9, 0)
