"""An index in Redis that is behind, loses data or holds garbage."""

import json
from collections.abc import Iterator
from contextlib import closing

import obstore
import pytest
import structlog
from obstore.store import S3Store

from shared.errors import AlreadyExists, Corrupt, NotFound, PreconditionFailed
from shared.registry import journal
from shared.registry.address import RegistryAddress
from shared.registry.base import Canary
from shared.registry.encoding import open_sealed, seal
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from tests.registry_damage import bucket_of, harm
from tests.registry_servers import shared_registry, shared_url
from tests.servers import S3Server


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with shared_registry(url) as opened:
        yield opened


@pytest.fixture
def bucket(url: str, s3: S3Server) -> S3Store:
    return bucket_of(s3, RegistryAddress.parse(url).prefix)


def publish(registry: Registry, request_id: str = "one") -> int:
    return registry.publish("tiny", {"a": 1}, {"x": b"weights" * 1000}, request_id=request_id).version


def names(bucket: S3Store, folder: str) -> list[str]:
    return [entry["path"] for page in obstore.list(bucket, folder) for entry in page]


def everything(registry: Registry, model_id: str = "tiny") -> object:
    aliases = registry.aliases(model_id)
    return (
        registry.list_versions(model_id),
        aliases,
        registry.canaries(model_id),
        {alias: registry.alias_history(model_id, alias) for alias in aliases},
        list(registry.events(model_id)),
    )


def test_readers_get_the_same_answers_after_redis_lost_all_data(registry, redis_server):
    for number in range(5):
        publish(registry, f"request-{number}")
    registry.set_alias("tiny", "stable", 2, actor="ann", reason="trial ended")
    registry.rollback_alias("tiny", "latest")
    before = everything(registry)
    with redis_server.client() as client:
        client.flushall()
    assert everything(registry) == before
    with pytest.raises(NotFound):
        registry.resolve("other", "latest")


def test_rebuilding_restores_the_index_and_continues_its_numbers(url, registry, redis_server, bucket):
    publish(registry, "one")
    publish(registry, "two")
    registry.set_alias("tiny", "stable", 1)
    registry.publish("acme/other", {}, {"x": b"1"}, request_id="three")
    registry.set_canary("tiny", "latest", Canary(1, 50))
    before = everything(registry), everything(registry, "acme/other")
    last_event = list(registry.events("tiny"))[-1].event
    with redis_server.client() as client:
        client.flushall()
    assert registry.models() == ["acme/other", "tiny"]
    for model_id in registry.models():
        registry.rebuild(model_id)
    assert (everything(registry), everything(registry, "acme/other")) == before
    assert publish(registry, "one") == 1, "request ids are restored too"
    assert publish(registry, "four") == 3
    events = list(registry.events("tiny", after_event=last_event))
    assert [event.event for event in events] == [last_event + 1, last_event + 2]
    with pytest.raises(AlreadyExists):
        registry.publish("tiny", {}, {"x": b"1"}, request_id="three")


@pytest.mark.parametrize("lost", ["index", "events"])
def test_an_index_that_lost_one_key_is_restored(registry, redis_server, lost):
    publish(registry)
    before = everything(registry)
    with redis_server.client() as client:
        assert client.delete(f"neap:{{tiny}}:{lost}") == 1
    assert everything(registry) == before


@pytest.mark.parametrize(
    "garbage",
    [
        ("HSET", "index", "aliases", "{"),
        ("HSET", "index", "aliases", '[{"alias":"latest"}]'),
        ("HSET", "index", "applied", "many"),
        ("HSET", "index", "version:1", "[]"),
        ("HDEL", "index", "version:1"),
        ("HDEL", "index", "applied", "versions"),
        ("HSET", "index", "request:one", "x"),
        ("SET", "index", "no hash"),
        ("SET", "events", "no stream"),
        ("XADD", "events", "5-0", "event", '{"change":{"alias":"latest"}}'),
        ("XADD", "events", "5-0", "event", "{}"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("first", ["read", "write"])
def test_garbage_in_redis_is_replaced_from_the_journal(registry, redis_server, garbage, first):
    publish(registry, "one")
    publish(registry, "two")
    registry.set_alias("tiny", "stable", 1, actor="ann")
    before = everything(registry)
    command, key, *values = garbage
    with redis_server.client() as client:
        if key == "events":
            *earlier, _ = client.xrange("neap:{tiny}:events")
            client.delete("neap:{tiny}:events")
            for number, fields in earlier if command == "XADD" else ():
                client.xadd("neap:{tiny}:events", fields, id=number)
        client.execute_command(command, f"neap:{{tiny}}:{key}", *values)
    if first == "write":
        assert publish(registry, "one") == 1
        assert publish(registry, "three") == 3
        assert registry.alias_history("tiny", "stable")[0].actor == "ann"
        assert len(list(registry.events("tiny", timeout_s=0.1))) == 7
    assert everything(registry)[0][-2:] == before[0]
    assert first == "write" or everything(registry) == before


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_what_a_newer_build_added_is_left_out_and_logged_once(url, registry, redis_server, bucket, is_rebuilt):
    """As in a rolling upgrade: fields in the index, in events and in journal records."""
    publish(registry, "one")
    registry.set_alias("tiny", "stable", 1, actor="ann")
    registry.set_canary("tiny", "stable", Canary(publish(registry, "two"), 5))
    before = everything(registry)
    for number in range(1, 5):
        path = f"models/tiny/journal/{number:020d}.json"
        record = open_sealed(bytes(obstore.get(bucket, path).bytes()), path)
        obstore.put(bucket, path, seal(with_new_fields(record)))
    with redis_server.client() as client:
        for name, value in client.hgetall("neap:{tiny}:index").items():
            if value.startswith((b"{", b"[")):
                new = with_new_fields(json.loads(value))
                client.hset("neap:{tiny}:index", name, json.dumps(new))
        events = client.xrange("neap:{tiny}:events")
        client.delete("neap:{tiny}:events")
        for number, fields in events:
            new = with_new_fields(json.loads(fields[b"event"]))
            client.xadd("neap:{tiny}:events", {"event": json.dumps(new)}, id=number)
        if is_rebuilt:
            client.flushall()
    journal._log_unknown.cache_clear()
    with structlog.testing.capture_logs() as logs, shared_registry(url) as reader:
        assert [everything(reader) for _ in range(3)] == [before] * 3
    assert not any(entry["event"] == "the index is damaged and is restored" for entry in logs)
    logged = [entry["of"] for entry in logs if entry.get("fields") == ["new_field"]]
    assert logged
    assert len(logged) == len(set(logged))


def with_new_fields(value):
    if isinstance(value, list):
        return [with_new_fields(part) for part in value]
    if isinstance(value, dict):
        return {**{key: with_new_fields(part) for key, part in value.items()}, "new_field": [1]}
    return value


def test_an_event_of_a_kind_that_a_newer_build_added_is_passed_over(registry, redis_server):
    publish(registry)
    last_event = registry.last_event("tiny")
    with redis_server.client() as client:
        new = {"event": json.dumps({"retired": {"version": 1}})}
        client.xadd("neap:{tiny}:events", new, id=f"{last_event + 1}-0")
        client.hset("neap:{tiny}:index", "events", last_event + 1)
    assert list(registry.events("tiny", after_event=last_event)) == []
    waits = []
    wait = registry._keeper.wait
    registry._keeper.wait = lambda *arguments: waits.append(arguments) or wait(*arguments)
    assert list(registry.events("tiny", after_event=last_event, timeout_s=0.5)) == []
    assert len(waits) <= 2, "it waits for a later event, not in a loop"
    assert registry.last_event("tiny") == last_event + 1, "the index was not rebuilt"
    registry.set_alias("tiny", "stable", 1)
    (event,) = registry.events("tiny", after_event=last_event)
    assert (event.event, event.change.alias) == (last_event + 2, "stable")
    assert len(registry.alias_history("tiny", "stable")) == 1


def test_garbage_in_redis_is_not_replaced_while_the_journal_is_damaged(registry, redis_server, bucket):
    publish(registry)
    harm(bucket, "models/tiny/journal/00000000000000000001.json", "truncate")
    with redis_server.client() as client:
        client.hset("neap:{tiny}:index", "request:one", "x")
    with pytest.raises(Corrupt):
        publish(registry)
    assert registry.resolve("tiny", "latest").version == 1, "its intact records are kept"


def test_a_redis_restored_from_an_old_copy_is_brought_up_to_date(url, registry, redis_server):
    """A lagging replica takes over, so the index is older than the journal. Both are valid."""
    publish(registry, "one")
    with redis_server.client() as client:
        keys = {key: client.dump(key) for key in client.keys("neap:*")}
        publish(registry, "two")
        after = everything(registry)
        for key, value in keys.items():
            client.restore(key, 0, value, replace=True)
    assert publish(registry, "two") == 2
    assert everything(registry) == after
    assert publish(registry, "three") == 3


def test_the_redis_of_another_registry_is_refused(url, registry, redis_server, s3):
    publish(registry)
    with closing(open_registry(shared_url(redis_server, s3))) as other:
        for call in (lambda: other.resolve("tiny", "latest"), lambda: publish(other), lambda: other.rebuild("tiny")):
            with pytest.raises((PreconditionFailed, NotFound)) as raised:
                call()
            assert raised.value.reason in ("INDEX_OF_ANOTHER_REGISTRY", "NOT_FOUND")
    assert registry.resolve("tiny", "latest").version == 1
