"""Publishers that are killed at any step, work at once or lose an answer, in every pairing of a store and an index."""

from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest

from shared.registry.factory import open_registry
from tests.registry_servers import SERVERS, new_place
from tests.shared.registry.publisher import forked, killed_at, publish_named

BEFORE_THE_RECORD = [
    f"{step}:{kind}" for kind in ("blobs", "manifests") for step in ("write", "written", "verified")
] + ["claimed", "journal:begin"]
# In a folder, files get their names when they are complete, and the record's name is the commit.
IN_A_FOLDER = [
    f"{step}:{kind}" for kind in ("blobs", "manifests", "requests") for step in ("part", "synced", "linked")
] + ["part:models", "synced:models"]


@pytest.fixture(params=["folder", "bucket", SERVERS[0]])
def place(request: pytest.FixtureRequest) -> str:
    """One Redis is enough here: the contract shows that all are alike."""
    return new_place(request.param, request)


def said(process: Any, pipe: Connection) -> list[dict[str, object]]:
    lines = []
    with suppress(EOFError):
        while True:
            lines.append(pipe.recv())
    process.join(60)
    assert process.exitcode == 0
    return lines


def publish(registry, request_id: str = "one") -> int:
    blobs = {"x": b"weights" * 1000}
    return registry.publish("tiny", {"a": 1}, blobs, request_id=request_id).version


def check_nothing_is_published_and_a_retry_publishes(open_again) -> None:
    reader = open_again()
    assert reader.list_versions("tiny") == []
    assert reader.aliases("tiny") == {}
    assert list(reader.events("tiny")) == []
    assert publish_named(open_again(), "one-0") == 1
    later = open_again()
    (made,) = later.list_versions("tiny")
    assert later.read_blob(made, "own") == b"one-0"
    assert later.aliases("tiny") == {"latest": 1}


@pytest.mark.parametrize("step", BEFORE_THE_RECORD)
def test_a_publisher_killed_before_the_record_has_not_published(place, open_again, step):
    killed_at(place, step)
    check_nothing_is_published_and_a_retry_publishes(open_again)


@pytest.mark.parametrize("step", IN_A_FOLDER)
def test_a_publisher_killed_while_it_writes_a_file_leaves_no_part_under_its_name(tmp_path, step):
    folder = str(tmp_path)
    killed_at(folder, step)
    check_nothing_is_published_and_a_retry_publishes(lambda: open_registry(folder))


def check_a_publisher_killed_after_the_record_has_published(place: str, step: str) -> None:
    with closing(open_registry(place)) as first:
        publish(first, "before")
    killed_at(place, step)
    with closing(open_registry(place, freshness_s=0.0)) as reader:
        assert reader.aliases("tiny") == {"latest": 2}
        assert reader.read_blob(reader.get("tiny", 2), "own") == b"one-0"
        assert reader.alias_history("tiny", "latest")[0].from_version == 1
        assert len(list(reader.events("tiny"))) == 4
    with closing(open_registry(place)) as other:
        assert publish_named(other, "one-0") == 2
        assert [v.version for v in other.list_versions("tiny")] == [2, 1]


@pytest.mark.parametrize("step", ["journal:written", "index:advanced"])
def test_a_publisher_killed_after_the_record_has_published_and_a_retry_changes_nothing(place, step):
    check_a_publisher_killed_after_the_record_has_published(place, step)


def test_a_publisher_killed_when_its_record_in_a_folder_has_its_name_has_published(tmp_path):
    check_a_publisher_killed_after_the_record_has_published(str(tmp_path), "linked:models")


def test_the_next_writer_after_a_killed_one_gets_the_next_version(place, open_again):
    writer = open_again()
    publish(writer, "before")
    killed_at(place, "journal:written")
    assert publish(writer, "after") == 3
    moves = [(c.from_version, c.to_version) for c in writer.alias_history("tiny", "latest")]
    assert moves == [(2, 3), (1, 2), (None, 1)]


def test_concurrent_processes_get_distinct_versions(place, open_again):
    processes = [forked(place, f"publisher-{number}", 10) for number in range(3)]
    versions = [line["version"] for process in processes for line in said(*process)]
    assert sorted(versions) == list(range(1, 31))
    reader = open_again()
    moves = [(c.from_version, c.to_version) for c in reader.alias_history("tiny", "latest")]
    assert moves == [(n - 1 or None, n) for n in range(30, 0, -1)]
    assert {v.manifest["by"] for v in reader.list_versions("tiny")} == {
        f"publisher-{p}-{n}" for p in range(3) for n in range(10)
    }


def test_concurrent_processes_with_one_request_id_publish_one_version(place, open_again):
    processes = [forked(place, "same", 5) for _ in range(3)]
    outputs = [said(*process) for process in processes]
    assert outputs[0] == outputs[1] == outputs[2]
    assert [v.version for v in open_again().list_versions("tiny")] == [5, 4, 3, 2, 1]


def test_a_record_is_written_once_if_the_answer_to_the_write_is_lost(open_again, monkeypatch):
    """The first attempt succeeds but its answer is lost. The client library's own retry then gets "already exists"."""
    registry = open_again()
    create = registry._store.create

    def create_twice(path: str, data: bytes) -> bool:
        create(path, data)
        return create(path, data)

    monkeypatch.setattr(registry._store, "create", create_twice)
    assert publish(registry) == 1
    assert registry._store.names("models/tiny/journal") == ["00000000000000000001.json"]
    change = registry.set_alias("tiny", "stable", 1, expected_version=0)
    assert (change.from_version, change.to_version) == (None, 1), "its own successful write is not a conflict"


def test_a_slow_publisher_does_not_return_an_index_to_an_older_state(place, open_again):
    """Between writing its record and the index, another client applies this record and one more."""
    other = open_again()

    def step(name: str) -> None:
        if name == "journal:written":
            assert publish(other, "two") == 2

    slow = open_registry(place, step=step)
    assert publish(slow, "one") == 1
    for registry in (open_again(), slow):
        assert registry._keeper.state("tiny", is_fresh=True).applied == 2
        assert len(list(registry.events("tiny"))) == 4
        assert registry.aliases("tiny") == {"latest": 2}
    slow.close()
