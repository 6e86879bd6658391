"""Folders of a neap whose order of events was that of SQLite, as such a neap wrote them (old_folder.json), open as they
are."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from shared.errors import AlreadyExists, Corrupt, Unavailable
from shared.registry.factory import open_registry
from shared.registry.folder_store import FolderStore
from shared.sqlite import Database
from tests.registry_damage import damaged

OLD = json.loads(Path(__file__).with_name("old_folder.json").read_text())
RECORD = "models/acme!tiny/journal/{:020d}.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in OLD["files"].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with closing(sqlite3.connect(tmp_path / "index.db")) as index:
        index.execute("PRAGMA journal_mode = WAL")
        index.executescript("\n".join(OLD["index"]))
        for name, value in OLD["pragmas"].items():
            index.execute(f"PRAGMA {name} = {value}")
    return tmp_path


def contents(root: Path) -> dict[str, object]:
    """In the form of `OLD["known"]`."""
    with closing(open_registry(str(root))) as registry:
        return {
            model_id: {
                "versions": [
                    [v.version, v.manifest_digest, v.create_time_s, v.size_bytes]
                    for v in registry.list_versions(model_id)
                ],
                "aliases": registry.aliases(model_id),
                "history": {
                    alias: [
                        [
                            change.from_version,
                            change.to_version,
                            change.actor,
                            change.reason,
                            change.change_time_s,
                            change.canary and [change.canary.version, change.canary.share_per_mille],
                        ]
                        for change in registry.alias_history(model_id, alias)
                    ]
                    for alias in registry.aliases(model_id)
                },
                "events": [event.event for event in registry.events(model_id)],
            }
            for model_id in OLD["known"]
        }


def keep_all(root: Path) -> None:
    pass


def lose_the_index(root: Path) -> None:
    (root / "index.db").unlink()


def lose_the_journal(root: Path) -> None:
    shutil.rmtree(root / "models")


def lose_the_last_records(root: Path) -> None:
    """As if the process had died after its commit in SQLite."""
    for number in (7, 8):
        (root / RECORD.format(number)).unlink()


def lose_a_record_in_between(root: Path) -> None:
    (root / RECORD.format(3)).unlink()


def damage_a_record(root: Path) -> None:
    path = root / RECORD.format(3)
    path.write_bytes(damaged(path.read_bytes(), "flip"))


@pytest.mark.parametrize(
    "lose",
    [keep_all, lose_the_index, lose_the_journal, lose_the_last_records, lose_a_record_in_between, damage_a_record],
)
def test_an_old_folder_opens_with_all_that_it_holds(root: Path, lose: Callable[[Path], None]) -> None:
    lose(root)
    assert contents(root) == OLD["known"]
    assert not (root / "index.db").exists()
    assert contents(root) == OLD["known"]
    records = {name: text for name, text in OLD["files"].items() if name.startswith("models")}
    assert {name: (root / name).read_text() for name in records} == records


def test_numbers_of_versions_and_events_go_on(root: Path) -> None:
    with closing(open_registry(str(root))) as registry:
        seen = registry.last_event("acme/tiny")
        assert seen == 10
        blobs = {"x": b"weights", "own": b"three"}
        made = registry.publish("acme/tiny", {"by": "three"}, blobs, request_id="three")
        assert made.version == 3
        events = list(registry.events("acme/tiny", after_event=seen))
        assert [event.event for event in events] == [11, 12]
        assert next(registry.events("other", after_event=4), None) is None


def test_requests_of_an_old_folder_are_known_in_all_models(root: Path) -> None:
    with closing(open_registry(str(root))) as registry:
        blobs = {"x": b"weights", "own": b"one"}
        assert registry.publish("acme/tiny", {"by": "one"}, blobs, request_id="one").version == 1
        with pytest.raises(AlreadyExists) as raised:
            registry.publish("other", {"by": "one"}, blobs, request_id="one")
        assert raised.value.metadata == {"model_id": "acme/tiny", "version": "1"}


def test_an_index_from_before_canaries_is_read(root: Path) -> None:
    lose_the_journal(root)
    with closing(sqlite3.connect(root / "index.db")) as index:
        for table in ("aliases", "alias_changes"):
            for column in ("canary_version", "canary_per_mille"):
                index.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    found = contents(root)["acme/tiny"]
    assert found["aliases"] == OLD["known"]["acme/tiny"]["aliases"]
    assert [change[5] for change in found["history"]["stable"]] == [None, None, None]


def test_what_is_only_in_the_log_of_a_killed_process_is_read(root: Path, tmp_path: Path) -> None:
    """SQLite moves it from index.db-wal to index.db when the last process ends, unless that is killed."""
    with closing(sqlite3.connect(root / "index.db", isolation_level=None)) as old:
        old.execute("BEGIN")
        old.execute("INSERT INTO alias_changes VALUES (8, 'other', 'stable', 1, 1, 'eve', '', 1.0, NULL, NULL)")
        old.execute("INSERT INTO events VALUES (11, 'other', NULL, 8)")
        old.execute("COMMIT")
        assert (root / "index.db-wal").stat().st_size
        killed = tmp_path / "killed"
        shutil.copytree(root, killed, ignore=shutil.ignore_patterns("killed"))
    with closing(open_registry(str(killed))) as registry:
        assert registry.last_event("other") == 11
        assert registry.alias_history("other", "stable")[0].actor == "eve"


def test_an_index_older_than_the_journal_is_set_aside(root: Path) -> None:
    shutil.copy(root / "index.db", root / "backup")
    with closing(open_registry(str(root))) as registry:
        registry.set_alias("acme/tiny", "new", 1)
        before = registry.aliases("acme/tiny")
    (root / "backup").rename(root / "index.db")
    with closing(open_registry(str(root))) as registry:
        assert registry.aliases("acme/tiny") == before
    assert not (root / "index.db").exists()


def test_an_empty_index_is_removed_and_nothing_else(root: Path) -> None:
    """An older version leaves it that found no index and refused to start."""
    assert contents(root) == OLD["known"]
    kept = (root / "index.db.old").read_bytes()
    (root / "index.db").write_bytes(b"")
    assert contents(root) == OLD["known"]
    assert not (root / "index.db").exists()
    assert (root / "index.db.old").read_bytes() == kept


@pytest.mark.parametrize("damage", ["garbage", "truncate", "row"])
def test_a_damaged_index_is_refused_until_it_is_moved_away(root: Path, damage: str) -> None:
    path = root / "index.db"
    if damage == "row":
        with closing(sqlite3.connect(path, isolation_level=None)) as index:
            index.execute("UPDATE alias_changes SET to_version = 'two' WHERE change = 7")
    elif damage == "garbage":
        path.write_bytes(b"not a database " * 1000)
    else:
        path.write_bytes(damaged(path.read_bytes(), damage))
    lose_the_last_records(root)
    with pytest.raises(Corrupt, match="Move it away"):
        open_registry(str(root))
    path.rename(root / "elsewhere")
    with closing(open_registry(str(root))) as registry:
        # A malformed row is one of those that the journal lacks, and what comes before it was taken over.
        num_events = 7 if damage == "row" else 6
        assert registry.last_event("acme/tiny") == OLD["known"]["acme/tiny"]["events"][num_events - 1]


def test_an_older_process_stops_using_the_folder(root: Path) -> None:
    """It would otherwise give out numbers of its own."""
    with closing(
        Database(root / "index.db", schema="", schema_version=2, application_id=OLD["pragmas"]["application_id"])
    ) as old:
        assert old.rows("SELECT * FROM events")
        open_registry(str(root)).close()
        with pytest.raises(Unavailable) as raised, old.transaction():
            pass
        assert raised.value.reason == "DATABASE_REPLACED"


def test_a_change_that_an_older_process_is_making_is_waited_for(root: Path) -> None:
    lose_the_journal(root)
    script = (
        "import sys; from shared.registry.factory import open_registry\n"
        "print(open_registry(sys.argv[1]).last_event('other'))"
    )
    with closing(sqlite3.connect(root / "index.db", isolation_level=None)) as old:
        old.execute("BEGIN IMMEDIATE")
        command = [sys.executable, "-c", script, str(root)]
        opening = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        old.execute("INSERT INTO alias_changes VALUES (8, 'other', 'stable', 1, 1, '', '', 1.0, NULL, NULL)")
        old.execute("INSERT INTO events VALUES (11, 'other', NULL, 8)")
        with pytest.raises(subprocess.TimeoutExpired):
            opening.wait(2)
        old.execute("COMMIT")
    assert opening.communicate(timeout=60)[0].splitlines()[-1] == "11"


@pytest.mark.parametrize("at", [1, 5, 12])
def test_a_process_killed_while_it_takes_over_leaves_the_rest_to_the_next(
    root: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    lose_the_journal(root)
    part, written = FolderStore._part, []

    def dying(self: FolderStore, path: str, data: bytes) -> object:
        written.append(path)
        if len(written) == at:
            raise KeyboardInterrupt
        return part(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "_part", dying)
        with pytest.raises(KeyboardInterrupt):
            open_registry(str(root))
    assert contents(root) == OLD["known"]
