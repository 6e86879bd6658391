"""`neap routers sweep`, tested against real servers."""

from shared.registry.address import SharedAddress
from shared.registry.canonical import digest_of
from shared.registry.object_store import ObjectStore
from tests.registry_servers import SERVERS, shared_registry, shared_url


def test_a_sweep_prints_what_it_found_and_removed(neap, start_redis, s3, monkeypatch):
    server = start_redis(SERVERS[0])
    with server.client() as client:
        client.flushall()
    url = shared_url(server, s3)
    with shared_registry(url) as registry:
        registry.publish("tiny", {}, {"x": b"1"}, request_id="one")
    objects = ObjectStore(SharedAddress.parse(url))
    objects.put_content("blobs", b"left over")
    monkeypatch.setattr("shared.registry.sweep.COMMIT_S", 0.0)
    monkeypatch.setattr("shared.registry.sweep.REQUEST_MARGIN_S", 0.0)
    monkeypatch.setenv("NEAP_REGISTRY", url)
    result = neap("routers", "sweep")
    assert result.exit_code == 0, result.output
    expected = "2 objects in use, 0 unused (0 bytes) removed, 1 unused but within the grace period"
    assert expected in result.stdout
    result = neap("routers", "sweep", "--grace-hours", "0", "--dry-run")
    assert "1 unused (9 bytes) to remove" in result.stdout
    assert objects.has_content("blobs", digest_of(b"left over"))
    result = neap("routers", "sweep", "--grace-hours", "0")
    assert "1 unused (9 bytes) removed" in result.stdout
    assert not objects.has_content("blobs", digest_of(b"left over"))


def test_a_sweep_of_the_embedded_registry_is_refused(neap, tmp_path):
    result = neap("routers", "sweep", "--registry", str(tmp_path / "registry"))
    assert result.exit_code != 0
    assert "BAD_REGISTRY" in result.output
