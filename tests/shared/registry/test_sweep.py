"""Sweeps of a real object store while publishers are working."""

import threading
import time
from collections.abc import Iterator

import obstore
import pytest
from obstore.store import S3Store

from shared.errors import Conflict, Corrupt, InvalidInput
from shared.registry.address import SharedAddress
from shared.registry.canonical import digest_of
from shared.registry.lease import PATH, Lease, LeaseWatch
from shared.registry.object_store import ObjectStore
from shared.registry.shared import SharedRegistry
from shared.registry.sweep import Sweep, sweep
from tests.registry_damage import bucket_of, content_path, harm
from tests.registry_servers import shared_registry

WEIGHTS = b"weights" * 100


@pytest.fixture
def registry(url: str) -> Iterator[SharedRegistry]:
    with shared_registry(url) as opened:
        yield opened


@pytest.fixture
def objects(url: str) -> ObjectStore:
    return ObjectStore(SharedAddress.parse(url))


@pytest.fixture
def bucket(url: str, s3) -> S3Store:
    return bucket_of(s3, SharedAddress.parse(url).prefix)


def publish(registry: SharedRegistry, data: bytes = WEIGHTS, request_id: str = "one"):
    return registry.publish("acme/tiny", {"a": 1}, {"x": data}, request_id=request_id)


def test_unused_objects_are_removed_and_used_ones_kept(registry, objects):
    version = publish(registry)
    objects.put_content("blobs", b"left over")
    objects.put_content("manifests", b"{}")
    rehearsed = sweep(objects, grace_s=0, settle_s=0, is_rehearsal=True)
    assert rehearsed == Sweep(
        num_in_use=2, num_removed=2, num_removed_bytes=11, num_in_grace_period=0
    )
    assert objects.read("blobs", digest_of(b"left over")) == b"left over"
    assert sweep(objects, grace_s=0, settle_s=0) == rehearsed
    assert registry.read_blob(version, "x") == WEIGHTS
    assert not objects.has_content("blobs", digest_of(b"left over"))
    assert not objects.has_content("manifests", digest_of(b"{}"))
    assert sweep(objects, grace_s=0, settle_s=0) == Sweep(2, 0, 0, 0)
    assert objects.get(PATH) is None


def test_objects_within_the_grace_period_are_kept(registry, objects):
    publish(registry)
    objects.put_content("blobs", b"left over")
    assert sweep(objects, grace_s=3600, settle_s=0) == Sweep(2, 0, 0, 1)
    assert objects.has_content("blobs", digest_of(b"left over"))
    with pytest.raises(InvalidInput):
        sweep(objects, grace_s=-1, settle_s=0)


def test_a_publisher_waits_for_a_sweep_and_stores_again_what_it_removed(registry, objects):
    # The object exists but is unused, so a publisher of the same contents would read it and not write it again.
    objects.put_content("blobs", WEIGHTS)
    done: list[object] = []
    publisher = threading.Thread(target=lambda: done.append(publish(registry)))
    with Lease(objects).held() as lease:
        publisher.start()
        deadline_s = time.monotonic() + 60
        while not objects.folders("manifests/sha256"):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        time.sleep(0.3)
        objects.remove_content("blobs", digest_of(WEIGHTS))
        lease.renew()
        assert objects.folders("models") == []
    publisher.join(60)
    (version,) = done
    assert registry.read_blob(version, "x") == WEIGHTS


def test_a_publisher_whose_check_for_a_sweep_is_too_old_does_not_record(url, monkeypatch):
    with shared_registry(url) as registry:
        monkeypatch.setattr("shared.registry.shared.COMMIT_S", 0.0)
        with pytest.raises(Exception, match="too many concurrent writers"):
            publish(registry)
        monkeypatch.undo()
        assert registry.list_versions("acme/tiny") == []
        assert publish(registry).version == 1


def test_a_lease_that_is_not_renewed_can_be_taken(registry, objects):
    objects.create(PATH, Lease(objects)._content())
    watch = LeaseWatch(objects, dead_s=0.3)
    assert watch.is_held()
    time.sleep(0.35)
    assert not watch.is_held()
    objects.replace(PATH, Lease(objects)._content())
    assert watch.is_held()
    # A later sweep can take the lease.
    assert sweep(objects, grace_s=0, settle_s=0, dead_s=0.3) == Sweep(0, 0, 0, 0)
    assert objects.get(PATH) is None


def test_a_second_sweep_is_refused_and_a_sweep_that_lost_its_lease_stops(objects, monkeypatch):
    objects.put_content("blobs", b"left over")
    with Lease(objects).held() as lease:
        stop = threading.Event()

        def keep_renewing():
            while not stop.wait(0.05):
                monkeypatch.setattr(lease, "_renewed_s", -1e9)
                lease.renew()

        renewing = threading.Thread(target=keep_renewing)
        renewing.start()
        try:
            monkeypatch.setattr("shared.registry.lease.RENEW_S", 0.2)
            with pytest.raises(Conflict) as caught:
                sweep(objects, grace_s=0, settle_s=0, dead_s=0.6)
        finally:
            stop.set()
            renewing.join()
        assert caught.value.reason == "SWEEP_RUNNING"
        objects.replace(PATH, Lease(objects)._content())
        monkeypatch.setattr(lease, "_renewed_s", -1e9)
        with pytest.raises(Conflict) as caught:
            lease.renew()
        assert caught.value.reason == "SWEEP_TAKEN_OVER"
    assert objects.get(PATH) is not None  # the lease now belongs to the other sweep
    assert objects.has_content("blobs", digest_of(b"left over"))


def test_nothing_is_removed_if_a_record_cannot_be_read(registry, objects, bucket):
    publish(registry)
    objects.put_content("blobs", b"left over")
    path = f"models/acme!tiny/journal/{1:020d}.json"
    record = bytes(obstore.get(bucket, path).bytes())
    obstore.put(bucket, path, record[:-9])
    with pytest.raises(Corrupt):
        sweep(objects, grace_s=0, settle_s=0)
    assert objects.has_content("blobs", digest_of(b"left over"))
    assert objects.get(PATH) is None


def test_no_blob_is_removed_if_a_manifest_is_damaged(registry, objects, bucket):
    version = publish(registry)
    publish(registry, b"other", "two")
    objects.put_content("blobs", b"left over")
    objects.put_content("manifests", b"{}")
    harm(bucket, content_path("manifests", version.manifest_digest), "truncate")
    found = sweep(objects, grace_s=0, settle_s=0)
    assert (found.num_removed, found.num_damaged) == (1, 1), "the manifest that no journal names"
    assert found.num_kept == 2
    assert objects.has_content("blobs", digest_of(WEIGHTS))
    assert publish(registry, WEIGHTS, "again").version == 3, "the same contents repair it"
    assert sweep(objects, grace_s=0, settle_s=0) == Sweep(4, 1, 9, 0)
