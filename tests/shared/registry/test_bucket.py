"""A bucket without Redis: what its polling asks for, and what is answered while it is away."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

import pytest

from shared.errors import NotFound, Unavailable
from shared.registry.address import RegistryAddress
from shared.registry.bucket_store import BucketStore
from shared.registry.factory import open_registry
from shared.registry.index import Advance, advance
from shared.registry.journal import Journal
from shared.registry.registry import Registry
from tests.reasons import raises
from tests.registry_servers import bucket_url
from tests.relay import cut_off
from tests.s3_gate import s3_gate
from tests.servers import READER_ENVIRONMENT
from tests.waiting import wait_until

HOUR_S = 3600.0


def publish(registry: Registry, request_id: str = "one") -> int:
    blobs = {"x": b"weights" * 1000}
    return registry.publish("tiny", {"a": 1}, blobs, request_id=request_id).version


@contextmanager
def counted(url: str, s3, freshness_s: float) -> Iterator[tuple[Registry, list[str]]]:
    """A client, and the requests it sends."""
    sent: list[str] = []

    def gate(method: str, path: str, headers: Mapping[str, str]) -> None:
        sent.append(f"{method} {path.partition('?')[0].rpartition('/')[2]}")

    with (
        s3_gate(s3.port, gate) as at,
        closing(open_registry(url.replace(s3.endpoint, at), freshness_s=freshness_s)) as opened,
    ):
        yield opened, sent


def test_a_fresh_answer_asks_for_nothing_and_another_for_the_next_record(s3):
    url = bucket_url(s3)
    with closing(open_registry(url)) as other, counted(url, s3, HOUR_S) as (registry, sent):
        publish(other)
        assert registry.resolve("tiny", "latest").version == 1
        sent.clear()
        for _ in range(10):
            registry.resolve("tiny", "latest")
            list(registry.events("tiny"))
        assert sent == []
        registry._index.freshness_s = 0.0
        registry.resolve("tiny", "latest")
        assert sent == ["HEAD 00000000000000000002.json"]


def test_a_model_without_routers_is_not_asked_for_at_every_call(s3):
    with counted(bucket_url(s3), s3, HOUR_S) as (registry, sent):
        for _ in range(10):
            with pytest.raises(NotFound):
                registry.resolve("tiny", "latest")
        assert len([request for request in sent if request.startswith("GET")]) <= 3
        sent.clear()
        assert registry.list_versions("tiny") == []
        assert sent == []


def test_what_another_client_changed_is_seen_after_a_while(s3):
    url = bucket_url(s3)
    with closing(open_registry(url)) as writer, closing(open_registry(url)) as reader:
        publish(writer)
        assert reader.aliases("tiny") == {"latest": 1}
        writer.set_alias("tiny", "stable", 1)
        wait_until(lambda: reader.aliases("tiny") == {"latest": 1, "stable": 1})


def test_writers_and_questions_for_a_request_never_rely_on_an_older_answer(s3):
    url = bucket_url(s3)
    with closing(open_registry(url)) as one, closing(open_registry(url, freshness_s=HOUR_S)) as other:
        publish(one)
        assert other.aliases("tiny") == {"latest": 1}
        publish(one, "two")
        one.set_alias("tiny", "stable", 2)
        assert other.find_publication("tiny", "two").version == 2
        one.set_alias("tiny", "stable", 1)
        assert other.set_alias("tiny", "stable", 2, expected_version=1).from_version == 1
        publish(one, "three")
        assert other.set_alias("tiny", "new", 3).to_version == 3


def test_what_is_known_is_served_while_the_bucket_is_away(s3):
    with (
        cut_off(s3.port) as (port, is_cut),
        closing(
            open_registry(bucket_url(s3).replace(s3.endpoint, f"http://127.0.0.1:{port}"), freshness_s=0.0)
        ) as registry,
    ):
        publish(registry)
        registry.resolve("tiny", "latest")
        is_cut.set()
        assert registry.resolve("tiny", "latest").version == 1
        assert len(list(registry.events("tiny"))) == 2
        for call in (lambda: registry.set_alias("tiny", "stable", 1), lambda: registry.resolve("other", "latest")):
            with raises(Unavailable, "OBJECT_STORE_UNAVAILABLE"):
                call()
        is_cut.clear()
        assert registry.set_alias("tiny", "stable", 1).to_version == 1


def test_workers_need_credentials_for_reading_only(s3, monkeypatch):
    url = bucket_url(s3)
    with closing(open_registry(url)) as writer:
        publish(writer)
    for name, value in READER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with closing(open_registry(url)) as reader:
        assert reader.read_blob(reader.resolve("tiny", "latest"), "x") == b"weights" * 1000
        with raises(Unavailable, "OBJECT_STORE_REFUSED"):
            reader.set_alias("tiny", "stable", 1)


def test_what_exists_is_found_while_another_thread_applies_only_a_part_of_it(s3):
    url = bucket_url(s3)
    with closing(open_registry(url)) as one, closing(open_registry(url)) as other:
        publish(one)
        assert other.aliases("tiny") == {"latest": 1}
        publish(one, "two")
        publish(one, "three")
        whole = other._index.advance

        def after_another(model_id: str, step: Advance) -> int:
            other._index.advance = whole
            part = Journal(other._store).after(model_id, step.before)[:1]
            whole(model_id, advance(other._index.state(model_id), part))
            return whole(model_id, step)

        other._index.advance = after_another
        assert other.find_publication("tiny", "three").version == 3


def test_a_removal_is_sent_once(s3):
    """A repeated one could arrive when the object is in use again."""
    sent: list[str] = []

    def gate(method, path, headers):
        if method == "DELETE" or "?delete" in path:
            sent.append(path)
            return 503
        return None

    with s3_gate(s3.port, gate) as endpoint:
        store = BucketStore(RegistryAddress.parse(bucket_url(s3).replace(s3.endpoint, endpoint)))
        store.create("blobs/x", b"x")
        with pytest.raises(Unavailable):
            store.remove("blobs/x")
    assert len(sent) == 1
