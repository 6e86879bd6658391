"""Tests of the embedded registry only: crashes, full disks, flipped bytes, several processes, files of other versions."""

import errno
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import Corrupt, Exhausted, InvalidInput, NotFound, PreconditionFailed
from shared.registry.base import Canary
from shared.registry.factory import open_registry
from shared.registry.index import SCHEMA_VERSION
from shared.registry.local import LocalRegistry
from tests.registry_damage import content_path
from tests.small_disk import run_on_small_disk

PUBLISHER = Path(__file__).with_name("publisher.py")
REPOSITORY = Path(__file__).parents[3]
STEPS = [
    f"{step}:{kind}"
    for kind in ("blobs", "manifests")
    for step in ("write", "written", "synced", "renamed", "verified")
] + ["index:begin", "index:before-commit"]


def publisher(*arguments: object, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **options.get("env", {})}  # type: ignore[dict-item]
    command = [sys.executable, str(PUBLISHER), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def objects(root: Path) -> list[Path]:
    return [
        path
        for kind in ("blobs", "manifests", "staging")
        for path in (root / kind).rglob("*")
        if path.is_file()
    ]


def publish(registry: LocalRegistry, request_id: str = "one") -> int:
    return registry.publish(
        "tiny", {"a": 1}, {"x": b"weights" * 1000}, request_id=request_id
    ).version


@pytest.mark.parametrize("step", STEPS)
def test_a_publisher_killed_before_the_commit_leaves_no_version_and_no_object(
    tmp_path: Path, step: str
) -> None:
    process = publisher(tmp_path, "one", 1, step)
    assert process.wait(60) == -9
    registry = LocalRegistry(tmp_path)
    assert registry.list_versions("tiny") == []
    assert list(registry.events("tiny")) == []
    assert objects(tmp_path) == []
    assert publish(registry) == 1


def test_a_publisher_killed_after_the_commit_has_published(tmp_path: Path) -> None:
    assert publisher(tmp_path, "one", 1, "index:committed").wait(60) == -9
    registry = LocalRegistry(tmp_path)
    (made,) = registry.list_versions("tiny")
    assert registry.read_blob(made, "own") == b"one-0"
    assert len(objects(tmp_path)) == 3
    assert not any((tmp_path / "staging").iterdir())
    again = publisher(tmp_path, "one", 1)
    assert json.loads(again.communicate(timeout=60)[0]) == {"version": 1}


@pytest.mark.parametrize("step", STEPS)
def test_a_full_disk_at_any_step_leaves_no_version_and_no_object(tmp_path: Path, step: str) -> None:
    """The step hook raises ENOSPC where the operating system would raise it."""

    def full(name: str) -> None:
        if name == step:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Exhausted) as raised:
        publish(LocalRegistry(tmp_path, step=full))
    assert raised.value.reason == "DISK_FULL"
    assert raised.value.retry_after_s is None
    assert objects(tmp_path) == []
    registry = LocalRegistry(tmp_path)
    assert registry.list_versions("tiny") == []
    assert publish(registry) == 1


def test_a_file_size_limit_while_publishing_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses the write (EFBIG): RLIMIT_FSIZE in the publisher's process is below the blob's size."""
    LocalRegistry(tmp_path).close()
    process = publisher(tmp_path, "one", 1, env={"FILE_SIZE_LIMIT": "300000"})
    assert json.loads(process.communicate(timeout=60)[0]) == {
        "error": "Exhausted",
        "reason": "DISK_FULL",
    }
    assert objects(tmp_path) == []
    assert LocalRegistry(tmp_path).list_versions("tiny") == []


def test_publishing_to_a_full_file_system_fails_and_changes_nothing(tmp_path: Path) -> None:
    """A 1 MiB tmpfs in a mount namespace: the first publications fit (they share a blob), then SQLite or a file hits ENOSPC."""
    check = (
        "import json,sys;from pathlib import Path;from shared.registry.local import LocalRegistry;"
        "v=LocalRegistry(Path(sys.argv[1])).list_versions('tiny',limit=1000);"
        "print(json.dumps({'readable':len(v),'newest':v[0].version}))"
    )
    script = '"$1" "$2" "$3" fill 200 && "$1" -c "$4" "$3"'
    command = ["sh", "-c", script, "sh", sys.executable, PUBLISHER, tmp_path, check]
    output = run_on_small_disk(tmp_path, "1m", *command)
    *attempts, after = map(json.loads, output.splitlines())
    errors = [attempt for attempt in attempts if "error" in attempt]
    made = [attempt["version"] for attempt in attempts if "version" in attempt]
    assert errors
    assert all(error == {"error": "Exhausted", "reason": "DISK_FULL"} for error in errors)
    assert made == list(range(1, len(made) + 1))
    assert after == {"readable": len(made), "newest": len(made)}


def test_after_a_disk_was_full_at_any_step_publishing_works_again(tmp_path: Path) -> None:
    """The publication is absent, or complete if it was committed before. The registry stays readable throughout."""
    steps = [*STEPS, "index:committed"]
    script = Path(__file__).with_name("full_disk.py")
    lines = run_on_small_disk(tmp_path, "4m", sys.executable, script, tmp_path, *steps).splitlines()
    seen = [json.loads(line) for line in lines]
    assert [line[0] for line in seen] == steps
    for number, (step, ended, here, elsewhere, left, again, records) in enumerate(seen, start=1):
        before = list(range(number - 1, 0, -1))
        is_committed = ended == str(number)
        assert is_committed or ended == "DISK_FULL", step
        assert here == elsewhere == ([number, *before] if is_committed else before), step
        assert left == [], step
        assert again == str(number), step
        # A publication and a move of "latest" each; a committed one may be written to the journal with the next change.
        assert records == 2 * number or (is_committed and number == len(steps)), step
    assert not any(ended.isdigit() for _, ended, *_ in seen[:8])


def test_a_read_only_folder_is_refused_with_a_reason(tmp_path: Path) -> None:
    """A read-only mount, because root may write anywhere else."""
    check = (
        "import sys;from pathlib import Path;from shared.errors import NeapError\n"
        "from shared.registry.local import LocalRegistry\n"
        "try: LocalRegistry(Path(sys.argv[1]))\n"
        "except NeapError as error: print(error.reason, error.message)"
    )
    script = '"$1" "$2" "$3" fill 1 && mount -o remount,ro "$3" && "$1" -c "$4" "$3"'
    command = ["sh", "-c", script, "sh", sys.executable, PUBLISHER, tmp_path, check]
    *_, said = run_on_small_disk(tmp_path, "4m", *command).splitlines()
    assert said.startswith("STORAGE_UNAVAILABLE")
    assert "(EROFS): it is read-only" in said


def test_a_failed_publisher_removes_no_object_of_a_successful_one(tmp_path: Path) -> None:
    """Both publishers need the same blob. The first one to write it fails after the other one has come to rely on it."""
    other = LocalRegistry(tmp_path)
    made = []

    def step(name: str) -> None:
        if name == "index:begin":
            made.append(publish(other, "two"))
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Exhausted):
        publish(LocalRegistry(tmp_path, step=step), "one")
    assert other.read_blob(other.get("tiny", made[0]), "x") == b"weights" * 1000


def test_a_sweep_removes_nothing_while_another_client_publishes(tmp_path: Path) -> None:
    def step(name: str) -> None:
        if name == "index:begin":
            LocalRegistry(tmp_path).close()

    registry = LocalRegistry(tmp_path, step=step)
    assert publish(registry) == 1
    assert registry.read_blob(registry.get("tiny", 1), "x") == b"weights" * 1000


def test_concurrent_processes_get_distinct_versions(tmp_path: Path) -> None:
    processes = [publisher(tmp_path, f"publisher-{number}", 10) for number in range(3)]
    lines = [line for p in processes for line in p.communicate(timeout=60)[0].splitlines()]
    versions = [json.loads(line)["version"] for line in lines]
    assert sorted(versions) == list(range(1, 31))
    registry = LocalRegistry(tmp_path)
    assert registry.aliases("tiny") == {"latest": 30}
    assert {v.manifest["by"] for v in registry.list_versions("tiny")} == {
        f"publisher-{p}-{n}" for p in range(3) for n in range(10)
    }
    moves = [(c.from_version, c.to_version) for c in registry.alias_history("tiny", "latest")]
    assert moves == [(n - 1 or None, n) for n in range(30, 0, -1)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_in_a_blob_is_reported_with_both_digests(tmp_path: Path) -> None:
    registry = LocalRegistry(tmp_path)
    publish(registry)
    made = registry.get("tiny", 1)
    assert registry.read_blob(made, "x")
    expected = made.manifest["blobs"]["x"]["digest"]
    flip(tmp_path / "blobs/sha256" / expected[7:9] / expected[7:])
    for reader in (registry, LocalRegistry(tmp_path)):
        with pytest.raises(Corrupt) as raised:
            reader.read_blob(made, "x")
        assert raised.value.metadata["expected_digest"] == expected
        assert raised.value.metadata["actual_digest"].startswith("sha256:")
        assert raised.value.metadata["actual_digest"] != expected
    publish(registry, "again")
    assert registry.read_blob(made, "x") == b"weights" * 1000, (
        "publishing the same bytes repairs the blob"
    )


@pytest.mark.parametrize("damage", ["huge", "folder"])
def test_a_manifest_that_is_too_large_or_a_folder_is_reported_as_damaged(
    tmp_path: Path, damage: str
) -> None:
    registry = LocalRegistry(tmp_path)
    publish(registry)
    path = tmp_path / content_path("manifests", registry.get("tiny", 1).manifest_digest)
    path.unlink()
    if damage == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.mkdir()
    (listed,) = registry.list_versions("tiny")
    assert ("more than" if damage == "huge" else "EISDIR") in listed.damage


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE versions SET create_time_s = 'yesterday' WHERE version = 1",
        "UPDATE versions SET manifest_digest = x'00ff' WHERE version = 1",
        "UPDATE versions SET manifest_digest = '../../index.db' WHERE version = 1",
    ],
)
def test_a_version_with_a_damaged_row_is_listed_as_damaged(tmp_path: Path, change: str) -> None:
    registry = LocalRegistry(tmp_path)
    publish(registry)
    publish(registry, "two")
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute(change)
    assert [bool(v.damage) for v in registry.list_versions("tiny")] == [False, True]
    with pytest.raises(Corrupt):
        registry.get("tiny", 1)
    assert registry.resolve("tiny", "latest").version == 2
    assert len(list(registry.events("tiny"))) == 4


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE alias_changes SET to_version = 'two' WHERE change = 1",
        "DELETE FROM alias_changes WHERE change = 1",
    ],
)
def test_a_damaged_row_of_an_alias_change_is_reported(tmp_path: Path, change: str) -> None:
    registry = LocalRegistry(tmp_path)
    publish(registry)
    registry.set_alias("tiny", "other", 1)
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute(change)
    with pytest.raises(Corrupt, match="rebuild-index") as raised:
        list(registry.events("tiny"))
    assert raised.value.reason == "INDEX_DAMAGED"
    assert registry.resolve("tiny", "other").version == 1
    assert len(registry.list_versions("tiny")) == 1


def test_a_digest_that_is_a_path_reads_no_other_file(tmp_path: Path) -> None:
    registry = LocalRegistry(tmp_path)
    publish(registry)
    made = registry.get("tiny", 1)
    made.manifest["blobs"]["x"]["digest"] = "sha256:../../../index.db"
    with pytest.raises(Corrupt):
        registry.read_blob(made, "x")


def test_an_index_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    LocalRegistry(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "index.db")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(PreconditionFailed, match="newer neap") as raised:
        LocalRegistry(tmp_path)
    assert raised.value.reason == "SCHEMA_TOO_NEW"
    assert raised.value.metadata == {
        "found": str(SCHEMA_VERSION + 1),
        "supported": str(SCHEMA_VERSION),
    }


def test_an_index_of_the_schema_before_canaries_is_migrated(tmp_path: Path) -> None:
    registry = LocalRegistry(tmp_path)
    publish(registry)
    before = registry.alias_history("tiny", "latest")
    registry.close()
    connection = sqlite3.connect(tmp_path / "index.db")
    for table in ("aliases", "alias_changes"):
        for column in ("canary_version", "canary_per_mille"):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    registry = LocalRegistry(tmp_path)
    assert registry.alias_history("tiny", "latest") == before
    registry.publish("tiny", {}, {"x": b"2"}, request_id="two", aliases=[])
    registry.set_canary("tiny", "latest", Canary(2, 1))
    assert LocalRegistry(tmp_path).canaries("tiny") == {"latest": Canary(2, 1)}


def test_databases_of_other_programs_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "index.db")
    connection.execute("CREATE TABLE other (x)")
    connection.close()
    with pytest.raises(PreconditionFailed, match="another program"):
        LocalRegistry(tmp_path)
    (tmp_path / "index.db").write_bytes(b"not a database " * 1000)
    with pytest.raises(Corrupt):
        LocalRegistry(tmp_path)


def test_open_registry_accepts_paths_and_file_urls(tmp_path: Path) -> None:
    made = publish(LocalRegistry(tmp_path / "a b"))
    for name in (
        str(tmp_path / "a b"),
        f"file://{tmp_path}/a%20b",
        f"file://localhost{tmp_path}/a b",
    ):
        registry = open_registry(name)
        assert registry.resolve("tiny", "latest").version == made
        registry.close()
    for name in ("redis://localhost", "s3://bucket", "", "file://elsewhere/path", "file://"):
        with pytest.raises(InvalidInput, match=r"file:///|path|objects=s3://"):
            open_registry(name)
    with pytest.raises(NotFound):
        open_registry(str(tmp_path / "new")).get("tiny", 1)
