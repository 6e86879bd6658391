"""A registry with many versions, and publishers with wrong clocks."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from shared.registry import publication
from shared.registry.address import RegistryAddress
from shared.registry.base import AliasChange
from shared.registry.bucket_store import BucketStore
from shared.registry.content_store import ContentStore
from shared.registry.factory import open_registry
from shared.registry.journal import Journal, JournalEntry, VersionRecord
from shared.registry.registry import Registry
from shared.registry.sweep import sweep
from tests.registry_servers import SERVERS, shared_registry

MODEL = "acme/tiny"
NUM_VERSIONS = 500
HOUR_S = 3600.0


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with shared_registry(url) as opened:
        yield opened


def test_five_hundred_versions_are_listed_resolved_and_restored(registry, url, start_redis):
    first = registry.publish(MODEL, {"a": 1}, {"x": b"weights"}, request_id="1")
    journal = Journal(BucketStore(RegistryAddress.parse(url)))
    for number in range(2, NUM_VERSIONS + 1):
        record = VersionRecord(number, first.manifest_digest, 1e9 + number, 7, str(number), "ann")
        moved = AliasChange(MODEL, "latest", number - 1, number, "ann", "published", 1e9 + number)
        assert journal.append(JournalEntry(MODEL, number, (moved,), record))
    with start_redis(SERVERS[0]).client() as client:
        client.flushall()
    with closing(open_registry(url)) as other:
        assert other.resolve(MODEL, "latest").version == NUM_VERSIONS
        found: list[int] = []
        while page := other.list_versions(MODEL, before=found[-1] if found else None):
            found += [version.version for version in page]
        assert found == list(range(NUM_VERSIONS, 0, -1))
        assert other.read_blob(other.get(MODEL, 250), "x") == b"weights"
        assert len(other.alias_history(MODEL, "latest")) == NUM_VERSIONS
        made = other.publish(MODEL, {"a": 2}, {"x": b"more"}, request_id="new")
        assert made.version == NUM_VERSIONS + 1
        # Old request ids are still known.
        repeated = other.publish(MODEL, {"a": 1}, {"x": b"weights"}, request_id="250")
        assert repeated.version == 250


def test_publishers_with_wrong_clocks_keep_the_order_and_all_versions(registry, url, monkeypatch):
    objects = BucketStore(RegistryAddress.parse(url))
    ContentStore(objects).put("blobs", b"left over")
    for request, shift_s in enumerate((HOUR_S * 1e4, -HOUR_S * 1e4, 0.0), start=1):
        with monkeypatch.context() as patch:
            patch.setattr(publication.time, "time", lambda now=1.7e9 + shift_s: now)
            made = registry.publish(MODEL, {"n": request}, {"x": b"%d" % request}, request_id=str(request))
            assert made.version == request
            # The age of an object is measured by the store's clock, not by the clock of this process.
            found = sweep(objects, grace_s=HOUR_S)
            assert found.num_in_grace_period == 1
    assert registry.resolve(MODEL, "latest").version == 3
    history = registry.alias_history(MODEL, "latest")
    assert [change.to_version for change in history] == [3, 2, 1]
    times = [version.create_time_s for version in registry.list_versions(MODEL)]
    assert times != sorted(times)
