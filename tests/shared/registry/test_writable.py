"""Whether a registry can be written is found out by a probe, which leaves nothing."""

from collections.abc import Callable

import obstore
import pytest

from neap_engine.doctor.checks import registry as examine
from shared.errors import Exhausted, Unavailable
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from tests.reasons import raises
from tests.registry_damage import bucket_of
from tests.registry_servers import shared_registry, shared_url
from tests.servers import READER_ENVIRONMENT, RedisServer, S3Server


def test_the_registry_is_read_and_written(place: str, open_again: Callable[[], Registry]) -> None:
    open_again().publish("tiny", {"a": 1}, {"x": b"weights"}, request_id="one")
    found = examine(place, ["tiny", "other"])
    assert found.status == "ok"
    assert found.facts == {"newest_versions": {"tiny": 1, "other": None}}
    assert "tiny has version 1; other has no router yet" in found.detail


def test_a_probe_leaves_nothing_in_the_bucket(own_redis: RedisServer, s3: S3Server) -> None:
    with shared_registry(shared_url(own_redis, s3, "kept")) as opened:
        opened.check_writable()
    left = [item["path"] for page in obstore.list(bucket_of(s3, "kept")) for item in page]
    assert left == ["neap-registry.json"]


def test_a_redis_that_stores_nothing_is_found(own_redis: RedisServer, s3: S3Server) -> None:
    with shared_registry(shared_url(own_redis, s3)) as opened:
        with own_redis.client() as client:
            client.config_set("maxmemory", "1")
        with raises(Exhausted, "REDIS_FULL"):
            opened.check_writable()


def test_credentials_that_may_only_read_are_found(
    own_redis: RedisServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = shared_url(own_redis, s3)
    open_registry(url).close()
    for name, value in READER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with shared_registry(url) as opened:
        assert opened.list_versions("tiny") == []
        with raises(Unavailable, "OBJECT_STORE_REFUSED"):
            opened.check_writable()


def test_a_password_is_not_shown(own_redis: RedisServer, s3: S3Server) -> None:
    with own_redis.client() as client:
        client.acl_setuser("neap", enabled=True, passwords=["+hunter2"], keys=["neap:*"], categories=["+@all"])
    url = shared_url(own_redis, s3).replace("//", "//neap:hunter2@", 1)
    found = examine(url, [])
    assert found.status == "ok"
    assert "hunter2" not in str(found)
