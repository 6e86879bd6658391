"""Sweeps of a bucket while publishers are working, and the lease that keeps them apart."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import obstore
import pytest
from obstore.store import S3Store

from shared.digests import digest_of
from shared.errors import Conflict, NeapError, PreconditionFailed, Unavailable
from shared.registry import bucket_store, index_keeper, publication
from shared.registry import sweep as sweep_module
from shared.registry.address import RegistryAddress
from shared.registry.bucket_store import BucketStore
from shared.registry.content_store import ContentStore
from shared.registry.journal import Journal
from shared.registry.lease import PATH, Lease, LeaseWatch
from shared.registry.registry import Registry
from shared.registry.sweep import Sweep, sweep
from tests.registry_damage import bucket_of, content_path
from tests.registry_servers import shared_registry
from tests.s3_gate import s3_gate

WEIGHTS = b"weights" * 100


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with shared_registry(url) as opened:
        yield opened


@pytest.fixture
def objects(url: str) -> BucketStore:
    return BucketStore(RegistryAddress.parse(url))


@pytest.fixture
def contents(objects: BucketStore) -> ContentStore:
    return ContentStore(objects)


@pytest.fixture
def bucket(url: str, s3) -> S3Store:
    return bucket_of(s3, RegistryAddress.parse(url).prefix)


def publish(registry: Registry, data: bytes = WEIGHTS, request_id: str = "one"):
    return registry.publish("acme/tiny", {"a": 1}, {"x": data}, request_id=request_id)


def test_a_publisher_waits_for_a_sweep_and_stores_again_what_it_removed(registry, objects, contents):
    # The object exists but is unused, so a publisher of the same contents would read it and not write it again.
    contents.put("blobs", WEIGHTS)
    done: list[object] = []
    publisher = threading.Thread(target=lambda: done.append(publish(registry)))
    with Lease(objects).held() as lease:
        publisher.start()
        deadline_s = time.monotonic() + 60
        while not objects.folders("manifests/sha256"):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        time.sleep(0.3)
        objects.remove_before(content_path("blobs", digest_of(WEIGHTS)), lease.renew())
        assert objects.folders("models") == []
    publisher.join(60)
    (version,) = done
    assert registry.read_blob(version, "x") == WEIGHTS


def test_a_publisher_whose_check_for_a_sweep_is_too_old_does_not_record(url, monkeypatch):
    with shared_registry(url) as registry:
        monkeypatch.setattr("shared.registry.lease.LeaseWatch.safe_s", 0.0)
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


def test_a_second_sweep_is_refused_and_a_sweep_that_lost_its_lease_stops(objects, contents, monkeypatch):
    contents.put("blobs", b"left over")
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
    assert contents.has("blobs", digest_of(b"left over"))


class Pause:
    """A place where a sweep stands still until the test lets it go on, the first time that it comes there."""

    def __init__(self) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        if not self._reached.is_set():
            self._reached.set()
            assert self._go_on.wait(60)

    def wait(self) -> None:
        assert self._reached.wait(60)

    def end(self) -> None:
        self._go_on.set()


def then(function, pause):
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        pause()
        return result

    return call


@pytest.fixture
def short_lease(monkeypatch):
    """A lease of 3 s, after which the store refuses removals. Publishers treat its holder as dead after 5 s."""
    monkeypatch.setattr("shared.registry.lease.TRUST_S", 3.0)
    monkeypatch.setattr("shared.registry.lease.RENEW_S", 0.5)
    monkeypatch.setattr("shared.registry.bucket_store.LeaseWatch", partial(LeaseWatch, dead_s=5.0))
    monkeypatch.setattr("shared.registry.publication.SWEEP_POLL_S", 0.05)


# Each waits for seconds of a store's clock. The last moment of a removal is in every run.
STANDSTILLS = [
    pytest.param("journals read", marks=pytest.mark.full),
    pytest.param("lease checked", marks=pytest.mark.full),
    pytest.param("removal signed", marks=pytest.mark.full),
    "on the way",
]


@pytest.mark.parametrize("standstill", STANDSTILLS)
@pytest.mark.usefixtures("short_lease")
def test_a_sweep_that_stood_still_removes_nothing_of_what_was_published_meanwhile(
    url, s3, registry, objects, contents, monkeypatch, standstill
):
    # What an earlier attempt has left behind: old enough to be swept, and found again by the publisher.
    with monkeypatch.context() as patch:
        patch.setattr(registry._publisher, "_claim", raising(Unavailable("stopped")))
        with pytest.raises(Unavailable):
            publish(registry)
    pause, caught = Pause(), []

    def gate(method, path, headers):
        if standstill == "on the way" and method == "DELETE" and "sha256" in path:
            pause()

    with s3_gate(s3.port, gate) as endpoint:
        swept = BucketStore(RegistryAddress.parse(url.replace(s3.endpoint, endpoint)))
        if standstill == "journals read":
            in_use = then(sweep_module._digests_in_use, pause)
            monkeypatch.setattr(sweep_module, "_digests_in_use", in_use)
        elif standstill == "removal signed":
            signed = then(bucket_store.signed_removal, pause)
            monkeypatch.setattr(bucket_store, "signed_removal", signed)
        elif standstill == "lease checked":
            in_use = then(
                sweep_module._digests_in_use, lambda: monkeypatch.setattr(Lease, "_is_own", then(Lease._is_own, pause))
            )
            monkeypatch.setattr(sweep_module, "_digests_in_use", in_use)
            monkeypatch.setattr("shared.registry.lease.RENEW_S", 0.0)

        def run():
            try:
                sweep(swept, grace_s=0, settle_s=0)
            except NeapError as error:
                caught.append(error.reason)

        sweeping = threading.Thread(target=run)
        sweeping.start()
        pause.wait()
        version = publish(registry)
        pause.end()
        sweeping.join(60)
    assert caught in (["SWEEP_TOO_SLOW"], ["OBJECT_STORE_REFUSED"])
    assert registry.read_blob(registry.get("acme/tiny", version.version), "x") == WEIGHTS
    assert contents.has("manifests", version.manifest_digest)
    # The next one waits for nobody, takes over and finds everything in use.
    assert sweep(objects, grace_s=0, settle_s=0, dead_s=0.3) == Sweep(2, 0, 0, 0)


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


@pytest.mark.usefixtures("short_lease")
@pytest.mark.full
def test_the_end_of_a_lost_lease_leaves_that_of_another_sweep(objects):
    other = Lease(objects)
    with Lease(objects).held() as lease:
        is_own = lease._is_own

        def taken_over_after_the_check():
            found = is_own()
            time.sleep(3.5)
            objects.replace(PATH, other._content())
            return found

        lease._is_own = taken_over_after_the_check
    assert other._is_own()


@pytest.mark.parametrize("ahead_s", [-7200.0, -120.0, 0.0, 60.0, 7200.0])
def test_a_removal_ends_by_the_clock_of_the_store(objects, contents, monkeypatch, ahead_s):
    """The clock of this machine is read before the removal is signed, and set in between."""
    contents.put("blobs", b"left over")
    digest = digest_of(b"left over")
    now_s = time.time()
    monkeypatch.setattr("shared.registry.timed_removal.time.time", lambda: now_s + ahead_s)
    if ahead_s == 0.0:
        objects.remove_before(content_path("blobs", digest), now_s + 30)
    else:
        with pytest.raises(Unavailable) as caught:
            objects.remove_before(content_path("blobs", digest), now_s + 30)
        assert caught.value.reason == "SWEEP_TOO_SLOW"
    assert contents.has("blobs", digest) == (ahead_s != 0.0)


def test_a_store_that_accepts_late_removals_is_refused(url, s3, objects, bucket, monkeypatch):
    monkeypatch.setattr(bucket_store, "PROBE_S", 1.2)
    objects.check_removals()
    assert objects.names("probes") == []

    def gate(method, path, headers):
        if method != "DELETE":
            return None
        obstore.delete(bucket, "probes/" + path.partition("?")[0].rpartition("/")[2])
        return 204

    with s3_gate(s3.port, gate) as endpoint:
        careless = BucketStore(RegistryAddress.parse(url.replace(s3.endpoint, endpoint)))
        with pytest.raises(PreconditionFailed) as caught:
            careless.check_removals()
    assert caught.value.reason == "NO_EXPIRING_REQUESTS"


def test_a_removal_that_fails_is_repeated_and_one_that_may_not_be_is_refused(url, s3, objects, contents):
    contents.put("blobs", b"left over")
    digest, answers = digest_of(b"left over"), [503, 503]
    with s3_gate(s3.port, lambda method, *_: answers.pop() if method == "DELETE" else None) as at:
        failing = BucketStore(RegistryAddress.parse(url.replace(s3.endpoint, at)))
        with pytest.raises(Unavailable) as caught:
            failing.remove_before(content_path("blobs", digest), time.time() + 30)
        assert caught.value.reason == "OBJECT_STORE_UNAVAILABLE"
        answers += [403]
        with pytest.raises(Unavailable) as caught:
            failing.remove_before(content_path("blobs", digest), time.time() + 30)
        assert caught.value.reason == "OBJECT_STORE_REFUSED"
    answers += [0, 503]
    with s3_gate(s3.port, lambda method, *_: (answers.pop() or None) if method == "DELETE" else None) as at:
        failing = BucketStore(RegistryAddress.parse(url.replace(s3.endpoint, at)))
        failing.remove_before(content_path("blobs", digest), time.time() + 30)
    assert not contents.has("blobs", digest)
    objects.remove_before(content_path("blobs", digest), time.time() + 30)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_publisher_that_stood_still_before_its_record_stores_again_what_was_swept(
    registry, objects, contents, monkeypatch, is_killed
):
    append = Journal.append

    def stand_still(journal, entry):
        assert sweep(objects, grace_s=0, settle_s=0).num_removed == 2
        late_s = index_keeper.elapsed_s() + 3600
        for module in (publication, index_keeper):
            monkeypatch.setattr(module, "elapsed_s", lambda: late_s)
        assert append(journal, entry)
        if is_killed:
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(Journal, "append", stand_still)
    if is_killed:
        with pytest.raises(KeyboardInterrupt):
            publish(registry)
    version = publish(registry)
    assert version.version == 1
    assert registry.read_blob(registry.get("acme/tiny", 1), "x") == WEIGHTS
    assert contents.has("manifests", version.manifest_digest)
