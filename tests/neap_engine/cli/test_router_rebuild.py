"""`neap routers rebuild-index`, tested against real servers."""

from contextlib import closing

from shared.registry.factory import open_registry
from tests.registry_servers import bucket_url, shared_url


def test_an_empty_index_is_rebuilt(neap, own_redis, s3, monkeypatch):
    url = shared_url(own_redis, s3)
    with closing(open_registry(url)) as registry:
        for model_id in ("acme/one", "two"):
            registry.publish(model_id, {}, {"x": b"1"}, request_id=model_id)
        registry.set_alias("two", "stable", 1)
    with own_redis.client() as client:
        client.flushall()
        monkeypatch.setenv("NEAP_REGISTRY", url)
        result = neap("routers", "rebuild-index")
        assert result.stdout.splitlines() == [
            "acme/one: 1 versions, 1 aliases, 2 events",
            "two: 1 versions, 2 aliases, 3 events",
        ]
        assert client.hget("neap:{two}:index", "applied") == b"2"
        client.flushall()
        neap("routers", "rebuild-index", "--registry", url, "--model", "two")
        assert sorted(client.keys()) == [b"neap:{two}:events", b"neap:{two}:index"]


def test_a_rebuild_that_cannot_work_is_an_error(neap, own_redis, s3, tmp_path):
    (tmp_path / "registry").mkdir()
    for without in (str(tmp_path / "registry"), bucket_url(s3)):
        result = neap("routers", "rebuild-index", "--registry", without, "--model", "tiny", code=1)
        assert "BAD_REGISTRY" in result.output
    url = shared_url(own_redis, s3)
    result = neap("routers", "rebuild-index", "--registry", url, "--model", "none", code=1)
    assert "NOT_FOUND" in result.output
    own_redis.kill()
    secret = url.replace("//", "//ann:hunter2@", 1)
    result = neap("routers", "rebuild-index", "--registry", secret, code=1)
    assert "REDIS_UNAVAILABLE" in result.output
    assert "hunter2" not in result.output
    assert "Traceback" not in result.output
