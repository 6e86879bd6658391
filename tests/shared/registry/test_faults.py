"""Servers that die, hang, refuse calls or come back. They are real processes, which the tests kill or suspend."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import structlog

from shared.errors import Corrupt, Exhausted, Unavailable
from shared.registry import bucket_store, redis_index
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from tests.reasons import raises
from tests.registry_servers import PUBLICATION_STEPS, Steps, bucket_url, shared_registry, shared_url
from tests.relay import cut_off, relay
from tests.s3_gate import s3_gate
from tests.servers import RedisServer, S3Server, free_ports, redis_programs


def publish(registry: Registry, request_id: str = "one") -> int:
    return registry.publish("tiny", {"a": 1}, {"x": b"weights" * 1000}, request_id=request_id).version


def calls(registry: Registry) -> list[Callable[[], object]]:
    """The last two write."""
    return [
        lambda: registry.resolve("tiny", "latest"),
        lambda: registry.aliases("tiny"),
        lambda: registry.list_versions("tiny"),
        lambda: registry.alias_history("tiny", "latest"),
        lambda: list(registry.events("tiny")),
        lambda: registry.set_alias("tiny", "stable", 1),
        lambda: publish(registry, "two"),
    ]


@pytest.fixture
def url(own_redis: RedisServer, s3: S3Server) -> str:
    return shared_url(own_redis, s3)


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    with shared_registry(url) as opened:
        yield opened


def test_opening_fails_if_redis_does_not_run(s3):
    (port,) = free_ports(1)
    with raises(Unavailable, "REDIS_UNAVAILABLE"):
        open_registry(f"redis://127.0.0.1:{port}?objects=s3://neap/x&endpoint={s3.endpoint}")


def test_calls_fail_while_redis_is_down_and_work_when_it_is_back_empty(registry, own_redis):
    publish(registry)
    registry.set_alias("tiny", "stable", 1, actor="ann")
    before = registry.aliases("tiny"), registry.alias_history("tiny", "stable")
    own_redis.kill()
    for call in calls(registry):
        with raises(Unavailable, "REDIS_UNAVAILABLE"):
            call()
    own_redis.start()
    assert (registry.aliases("tiny"), registry.alias_history("tiny", "stable")) == before
    assert publish(registry, "two") == 2


def test_calls_end_within_their_timeout_if_redis_hangs(url, own_redis, monkeypatch):
    for name in ("CONNECT", "ANSWER", "WAIT"):
        monkeypatch.setattr(redis_index, f"REDIS_{name}_S", 0.3)
    registry = open_registry(url)
    publish(registry)
    own_redis.hold()
    try:
        for call in calls(registry):
            with raises(Unavailable, "REDIS_UNAVAILABLE"):
                call()
    finally:
        own_redis.resume()
    with closing(registry):
        assert registry.resolve("tiny", "latest").version == 1


@pytest.mark.parametrize("how", ["empty", "with what it had"])
def test_a_watcher_misses_no_event_when_redis_is_restarted(tmp_path, s3, how):
    keeps = ["--appendonly", "yes", "--appendfsync", "always"] if how != "empty" else []
    server = RedisServer(tmp_path / "redis", redis_programs()["valkey-9"], *keeps)
    try:
        server.start()
        with shared_registry(shared_url(server, s3)) as registry:
            publish(registry)
            seen = registry.last_event("tiny")
            server.kill()
            for call in (
                lambda: list(registry.events("tiny", after_event=seen, timeout_s=1.0)),
                lambda: registry.set_alias("tiny", "stable", 1),
                lambda: registry.list_versions("tiny"),
                lambda: publish(registry, "two"),
            ):
                with raises(Unavailable, "REDIS_UNAVAILABLE"):
                    call()
            server.start()
            assert list(registry.events("tiny", after_event=seen)) == []
            assert publish(registry, "two") == 2
            registry.set_alias("tiny", "stable", 1)
            events = list(registry.events("tiny", after_event=seen))
            assert [event.event for event in events] == [seen + 1, seen + 2, seen + 3]
            assert [v.version for v in registry.list_versions("tiny")] == [2, 1]
    finally:
        server.kill()


def test_if_redis_dies_between_record_and_index_a_retry_returns_the_same_version(url, registry, own_redis):
    """The publication succeeds although its publisher gets Unavailable. Repeating the request finds it."""

    def step(name: str) -> None:
        if name == "journal:written":
            own_redis.kill()

    with closing(open_registry(url, step=step)) as dying, raises(Unavailable, "REDIS_UNAVAILABLE"):
        publish(dying)
    own_redis.start()
    assert publish(registry) == 1
    assert len(registry.list_versions("tiny")) == 1


def test_if_redis_loses_its_data_between_record_and_index_the_publication_succeeds(url, registry, own_redis):
    publish(registry, "before")

    def step(name: str) -> None:
        if name == "journal:written":
            with own_redis.client() as client:
                client.flushall()

    with closing(open_registry(url, step=step)) as client:
        assert publish(client) == 2
    assert registry.aliases("tiny") == {"latest": 2}


def test_a_redis_with_full_memory_is_reported_and_works_when_it_has_room(registry, own_redis):
    publish(registry)
    with own_redis.client() as client:
        client.config_set("maxmemory", "1")
    for call in calls(registry)[-2:]:
        with raises(Exhausted, "REDIS_FULL"):
            call()
    assert registry.resolve("tiny", "latest").version == 1, "reading still works"
    with own_redis.client() as client:
        client.config_set("maxmemory", "0")
    assert publish(registry, "two") == 2


@pytest.mark.parametrize("program", redis_programs())
def test_after_a_failover_old_connections_are_given_up(tmp_path, s3, program):
    """They stay with the server that was demoted, while the address means another one."""
    servers = [RedisServer(tmp_path / name, redis_programs()[program]) for name in ("old", "new")]
    old, new = servers
    target = old
    try:
        for server in servers:
            server.start()
        with relay(lambda: target.port) as port:
            url = shared_url(old, s3).replace(f":{old.port}?", f":{port}?")
            with shared_registry(url) as registry, ThreadPoolExecutor(4) as pool:
                publish(registry)
                together = threading.Barrier(4)
                list(pool.map(lambda _: together.wait() * 0 or registry.aliases("tiny"), range(4)))
                with old.client() as client:
                    client.replicaof("127.0.0.1", new.port)
                target = new
                assert registry.set_alias("tiny", "stable", 1).to_version == 1
                assert publish(registry, "two") == 2
                together.reset()
                seen = list(pool.map(lambda _: together.wait() * 0 or registry.aliases("tiny"), range(4)))
                assert seen == [{"latest": 2, "stable": 1}] * 4
    finally:
        for server in servers:
            server.kill()


def test_a_change_whose_index_cannot_be_written_is_said_to_be_recorded_and_seen_at_the_next_look(url, own_redis):
    def step(name: str) -> None:
        if name == "journal:written" and is_full:
            with own_redis.client() as client:
                client.config_set("maxmemory", "1")

    is_full = False
    with closing(open_registry(url, step=step)) as registry:
        publish(registry)
        is_full = True
        with raises(Exhausted, "REDIS_FULL") as raised:
            registry.set_alias("tiny", "stable", 1)
        assert raised.value.metadata["is_recorded"] == "true"
        assert registry.aliases("tiny") == {"latest": 1}, "reading still works"
        with own_redis.client() as client:
            client.config_set("maxmemory", "0")
        registry._keeper._looked_at_s.clear()
        assert registry.aliases("tiny") == {"latest": 1, "stable": 1}


def test_missing_permissions_and_wrong_passwords_of_redis_are_reported(own_redis, s3):
    with own_redis.client() as client:
        client.acl_setuser("neap", enabled=True, passwords=["+s3cr3t@/"], keys=["neap:*"], categories=["+@all"])
    with closing(open_registry(shared_url(own_redis, s3).replace("//", "//neap:s3cr3t%40%2F@", 1))):
        pass
    wrong = shared_url(own_redis, s3).replace("//", "//neap:hunter2@", 1)
    with raises(Unavailable, "REDIS_REFUSED") as raised:
        open_registry(wrong)
    assert "hunter2" not in raised.value.message + str(raised.value.metadata)
    with own_redis.client() as client:
        client.acl_setuser("neap", categories=["-@all"])
    with raises(Unavailable, "REDIS_REFUSED"):
        open_registry(wrong.replace("hunter2", "s3cr3t%40%2F"))


def test_a_redis_that_may_evict_keys_causes_a_warning(own_redis, s3):
    with own_redis.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    with structlog.testing.capture_logs() as logs, closing(open_registry(shared_url(own_redis, s3))):
        pass
    assert any(entry.get("policy") == "allkeys-lru" for entry in logs)


@pytest.mark.full
def test_calls_fail_while_s3_is_down_and_work_when_it_is_back(own_redis, own_s3):
    registry = open_registry(shared_url(own_redis, own_s3))
    with closing(registry):
        made = registry.get("tiny", publish(registry))
        own_s3.kill()
        assert registry.resolve("tiny", "latest") == made, "the index and cached contents are still served"
        for call in (
            lambda: registry.read_blob(made, "x"),
            lambda: registry.set_alias("tiny", "stable", 1),
            lambda: publish(registry, "two"),
        ):
            with raises(Unavailable, "OBJECT_STORE_UNAVAILABLE"):
                call()
        with own_redis.client() as client:
            client.flushall()
        with raises(Unavailable, "OBJECT_STORE_UNAVAILABLE"):
            registry.resolve("tiny", "latest")
        own_s3.start()
        assert registry.resolve("tiny", "latest") == made
        assert publish(registry, "two") == 2


def test_opening_fails_if_s3_does_not_run_or_credentials_are_missing(own_redis, s3, monkeypatch):
    (port,) = free_ports(1)
    dead = shared_url(own_redis, s3).replace(s3.endpoint, f"http://127.0.0.1:{port}")
    with raises(Unavailable, "OBJECT_STORE_UNAVAILABLE"):
        open_registry(dead)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with raises(Unavailable, "OBJECT_STORE_REFUSED") as raised:
        open_registry(shared_url(own_redis, s3))
    assert "hunter2" not in raised.value.message


@pytest.mark.full
def test_calls_end_within_their_timeout_if_s3_hangs(own_redis, own_s3, monkeypatch):
    """Every call ends within the limits of shared.timeouts, which are short here.
    A call with a limit elsewhere would take longer."""
    for name in ("RECORD", "CONTENT", "STALL", "SENDING_STALL", "RETRY"):
        monkeypatch.setattr(bucket_store, f"OBJECT_STORE_{name}_S", 1)
    url = shared_url(own_redis, own_s3)
    steps = Steps()
    with closing(open_registry(url, step=steps)) as registry:
        made = registry.get("tiny", publish(registry))
        steps.at("write:blobs", own_s3.hold)
        try:
            for call in (
                lambda: registry.publish("tiny", {}, {"x": b"new"}, request_id="sent"),
                lambda: publish(registry, "two"),
                lambda: registry.set_alias("tiny", "stable", 1),
                lambda: registry.read_blob(made, "x"),
                lambda: registry.rebuild("tiny"),
                lambda: open_registry(url),
            ):
                with raises(Unavailable, "OBJECT_STORE_UNAVAILABLE"):
                    call()
            assert registry.resolve("tiny", "latest").version == 1
            assert len(registry.list_versions("tiny")) == 1
        finally:
            own_s3.resume()
        assert publish(registry, "two") == 2


@pytest.mark.parametrize("has_redis", [False, True])
def test_if_s3_is_lost_at_any_step_of_a_publication_a_retry_publishes_once(own_redis, s3, has_redis):
    """The proxy drops its connections and accepts no new ones. Readers see the whole publication or nothing of it.
    Repeating the request succeeds."""
    url = shared_url(own_redis, s3) if has_redis else bucket_url(s3)
    steps = Steps()
    with (
        cut_off(s3.port) as (port, is_cut),
        closing(open_registry(url, freshness_s=0.0)) as registry,
        closing(open_registry(url.replace(s3.endpoint, f"http://127.0.0.1:{port}"), step=steps)) as cut,
    ):
        for number, step in enumerate(PUBLICATION_STEPS):
            model_id = f"model-{number}"

            def attempt(model_id: str = model_id) -> int:
                blobs = {"x": model_id.encode()}
                return cut.publish(model_id, {"a": model_id}, blobs, request_id=model_id).version

            steps.at(step, is_cut.set)
            has_happened = step in ("journal:written", "index:advanced")
            if has_happened:
                assert attempt() == 1, "the publication sends nothing more to S3 after this step"
            else:
                with raises(Unavailable, "OBJECT_STORE_UNAVAILABLE"):
                    attempt()
            assert is_cut.is_set(), step
            seen = [v.version for v in registry.list_versions(model_id) if not v.damage]
            # S3 may have executed a request whose answer was lost.
            assert seen in ([[1]] if has_happened else [[], [1]])
            assert registry.aliases(model_id) == ({"latest": 1} if seen else {})
            is_cut.clear()
            assert attempt() == 1, step
            (made,) = registry.list_versions(model_id)
            assert registry.read_blob(made, "x") == model_id.encode()


WRITTEN = ["/blobs/", "/manifests/", "/requests/", "/journal/", "neap-registry.json"]


@pytest.mark.parametrize("part", WRITTEN)
def test_a_write_that_s3_refuses_because_of_a_concurrent_one_is_repeated(own_redis, s3, part):
    """409 ConditionalRequestConflict: nothing was written, and the client is to try again."""
    refused: list[str] = []

    def gate(method: str, path: str, headers: Mapping[str, str]) -> int | None:
        if method == "PUT" and part in path and len(refused) < 2:
            assert headers["If-None-Match"] == "*"
            refused.append(path)
            return 409
        return None

    url = shared_url(own_redis, s3)
    with s3_gate(s3.port, gate) as at, shared_registry(url.replace(s3.endpoint, at)) as registry:
        assert publish(registry) == 1
    assert len(refused) == 2
    with closing(open_registry(url)) as registry:
        assert registry.read_blob(registry.get("tiny", 1), "x") == b"weights" * 1000
        assert publish(registry) == 1, "it happened once"


def test_conflicts_that_do_not_end_make_the_object_store_unavailable(own_redis, s3, monkeypatch):
    monkeypatch.setattr(bucket_store, "OBJECT_STORE_CONFLICT_PAUSES_S", (0.0,))
    is_refusing = False

    def gate(method: str, path: str, headers: Mapping[str, str]) -> int | None:
        return 409 if is_refusing and method == "PUT" and "/journal/" in path else None

    url = shared_url(own_redis, s3)
    with s3_gate(s3.port, gate) as at, shared_registry(url.replace(s3.endpoint, at)) as registry:
        is_refusing = True
        with raises(Unavailable, "OBJECT_STORE_BUSY"):
            publish(registry)
        is_refusing = False
        assert publish(registry) == 1


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_answers_damaged_in_transit_are_not_accepted(own_redis, s3, damage):
    """A proxy that truncates large answers or changes a byte in them."""
    url = shared_url(own_redis, s3)
    with closing(open_registry(url)) as registry:
        made = registry.get("tiny", publish(registry))
    with relay(s3.port, answer=damaged(damage)) as port:
        through = url.replace(s3.endpoint, f"http://127.0.0.1:{port}")
        with closing(open_registry(through)) as registry:
            with pytest.raises((Corrupt, Unavailable)) as raised:
                registry.read_blob(made, "x")
            assert type(raised.value) is (Corrupt if damage == "flip" else Unavailable)


def damaged(damage: str) -> Callable[[bytes], tuple[bytes, bool]]:
    """An `answer` function for `relay` that damages the data of the tests' blob, which it finds by its pattern."""

    def answer(data: bytes) -> tuple[bytes, bool]:
        if b"weightsweights" not in data:
            return data, True
        if damage == "cut":
            return data[: data.index(b"weightsweights") + 20], False
        return data.replace(b"weightsweights", b"weightsWeights", 1), True

    return answer
