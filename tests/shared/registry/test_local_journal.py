"""A folder whose index.db was removed, damaged or restored from a backup, and the journal from which it is rebuilt."""

import errno
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from shared.errors import Corrupt, NeapError, NotFound, PreconditionFailed, Unavailable
from shared.registry.base import Canary
from shared.registry.blobs import registry_error
from shared.registry.folder_records import FolderRecords
from shared.registry.index import SCHEMA_VERSION
from shared.registry.local import LocalRegistry
from shared.registry.local_rebuild import rebuild_folder
from tests.registry_damage import content_path, damaged

MODELS = ("acme/tiny", "other")


def publish(
    registry: LocalRegistry, request_id: str, model_id: str = "acme/tiny", **options
) -> int:
    blobs = {"x": b"weights" * 100, "own": request_id.encode()}
    return registry.publish(
        model_id, {"by": request_id}, blobs, request_id=request_id, **options
    ).version


def fill(root: Path) -> None:
    registry = LocalRegistry(root)
    publish(registry, "one")
    publish(registry, "elsewhere", "other", aliases=["stable"])
    publish(registry, "two", aliases=["latest", "stable"], actor="ann")
    registry.set_canary("acme/tiny", "stable", Canary(1, 50), actor="bob", reason="try")
    registry.rollback_alias("acme/tiny", "stable")
    registry.set_alias("acme/tiny", "latest", 1)
    registry.close()


def everything(root: Path) -> object:
    registry = LocalRegistry(root)
    try:
        return [
            (
                registry.list_versions(model_id),
                registry.aliases(model_id),
                registry.canaries(model_id),
                {
                    alias: registry.alias_history(model_id, alias)
                    for alias in registry.aliases(model_id)
                },
                list(registry.events(model_id)),
            )
            for model_id in MODELS
        ]
    finally:
        registry.close()


def records(root: Path) -> list[Path]:
    return sorted((root / "models").rglob("*.json"))


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    path.write_bytes(b"not a database " * 1000)


def truncate(path: Path) -> None:
    path.write_bytes(damaged(path.read_bytes(), "truncate"))


def overwrite_one_page(path: Path) -> None:
    """Overwrite a page of an index of the table alias_changes. Opening the registry does not read this page."""
    with sqlite3.connect(path) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'alias_changes_by_alias'"
        (page,) = connection.execute(query).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    data = path.read_bytes()
    path.write_bytes(data[: (page - 1) * size] + b"\xff" * size + data[page * size :])


@pytest.mark.parametrize(
    ("harm", "kind", "reason"),
    [
        (remove, PreconditionFailed, "INDEX_MISSING"),
        (empty, PreconditionFailed, "INDEX_MISSING"),
        (overwrite, Corrupt, "INDEX_DAMAGED"),
        (truncate, Corrupt, "INDEX_DAMAGED"),
        (overwrite_one_page, Corrupt, "INDEX_DAMAGED"),
    ],
)
def test_a_lost_or_damaged_index_is_reported_and_rebuilt_from_the_journal(
    tmp_path: Path, harm: Callable[[Path], None], kind: type[NeapError], reason: str
) -> None:
    fill(tmp_path)
    before = everything(tmp_path)
    harm(tmp_path / "index.db")
    for _ in range(2):
        with pytest.raises(kind, match="neap routers rebuild-index --registry") as raised:
            LocalRegistry(tmp_path)
        assert raised.value.reason == reason
    states = rebuild_folder(tmp_path)
    assert {name: (s.num_versions, s.num_events) for name, s in states.items()} == {
        "acme/tiny": (2, 8),
        "other": (1, 2),
    }
    assert everything(tmp_path) == before
    registry = LocalRegistry(tmp_path)
    assert publish(registry, "one") == 1, "request ids are restored too"
    last_event = registry.last_event("acme/tiny")
    assert publish(registry, "three") == 3
    assert next(registry.events("acme/tiny", after_event=last_event)).event > last_event
    assert registry.read_blob(registry.get("acme/tiny", 3), "own") == b"three"


def test_an_intact_index_is_rebuilt_while_other_clients_use_it(tmp_path: Path) -> None:
    fill(tmp_path)
    before = everything(tmp_path)
    registry = LocalRegistry(tmp_path)
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute("UPDATE alias_changes SET to_version = 'two' WHERE change = 2")
    with pytest.raises(Corrupt):
        list(registry.events("other"))
    rebuild_folder(tmp_path)
    assert everything(tmp_path) == before
    assert len(list(registry.events("other"))) == 2
    assert publish(registry, "three") == 3


def test_an_unreadable_index_is_not_replaced_while_a_service_runs(tmp_path: Path) -> None:
    fill(tmp_path)
    registry = LocalRegistry(tmp_path)
    (tmp_path / "index.db").unlink()
    with pytest.raises(PreconditionFailed) as refused:
        rebuild_folder(tmp_path)
    assert refused.value.reason == "REGISTRY_IN_USE"
    for call in (lambda: publish(registry, "three"), lambda: registry.aliases("other")):
        with pytest.raises(Unavailable) as raised:
            call()
        assert raised.value.reason == "DATABASE_REPLACED", (
            "a change written to the replaced index would be lost"
        )
    registry.close()
    rebuild_folder(tmp_path)
    assert LocalRegistry(tmp_path).aliases("other") == {"stable": 1}


def test_an_index_from_a_backup_is_brought_up_to_date(tmp_path: Path) -> None:
    registry = LocalRegistry(tmp_path)
    publish(registry, "one")
    registry.close()
    shutil.copy(tmp_path / "index.db", tmp_path / "backup")
    fill_more = LocalRegistry(tmp_path)
    publish(fill_more, "two", actor="ann")
    publish(fill_more, "elsewhere", "other")
    fill_more.close()
    before = everything(tmp_path)
    shutil.copy(tmp_path / "backup", tmp_path / "index.db")
    with pytest.raises(PreconditionFailed, match="rebuild-index") as raised:
        LocalRegistry(tmp_path)
    assert raised.value.reason == "INDEX_BEHIND"
    rebuild_folder(tmp_path)
    assert everything(tmp_path) == before


def test_a_running_service_whose_index_was_rolled_back_assigns_no_number_twice(
    tmp_path: Path,
) -> None:
    registry = LocalRegistry(tmp_path)
    publish(registry, "one")
    publish(registry, "two", aliases=())
    with sqlite3.connect(tmp_path / "index.db") as connection:
        for table in ("events", "version_blobs", "versions"):
            connection.execute(f"DELETE FROM {table} WHERE version = 2")
    for call in (
        lambda: publish(registry, "three", aliases=()),
        lambda: registry.set_alias("acme/tiny", "stable", 1),
    ):
        with pytest.raises(PreconditionFailed) as raised:
            call()
        assert raised.value.reason == "INDEX_BEHIND"
    assert [version.version for version in registry.list_versions("acme/tiny")] == [1]
    rebuild_folder(tmp_path)
    assert publish(registry, "three") == 3


def test_opening_a_folder_without_a_journal_writes_one(tmp_path: Path) -> None:
    fill(tmp_path)
    before = everything(tmp_path)
    shutil.rmtree(tmp_path / "models")
    assert everything(tmp_path) == before
    assert len(records(tmp_path)) == 10
    (tmp_path / "index.db").unlink()
    rebuild_folder(tmp_path)
    assert everything(tmp_path) == before


def test_without_index_and_journal_rebuilding_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    shutil.rmtree(tmp_path / "models")
    (tmp_path / "index.db").unlink()
    with pytest.raises(PreconditionFailed, match="from a backup") as raised:
        LocalRegistry(tmp_path)
    assert raised.value.reason == "INDEX_MISSING"
    with pytest.raises(NotFound) as missing:
        rebuild_folder(tmp_path)
    assert missing.value.reason == "NO_JOURNAL"
    with pytest.raises(NotFound):
        rebuild_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_record_is_rewritten_from_the_index(tmp_path: Path, damage: str) -> None:
    fill(tmp_path)
    before = everything(tmp_path)
    sound = {path: path.read_bytes() for path in records(tmp_path)}
    path = records(tmp_path)[2]
    path.unlink() if damage == "delete" else path.write_bytes(damaged(path.read_bytes(), damage))
    assert everything(tmp_path) == before, "the index does not depend on it"
    rebuild_folder(tmp_path)
    assert {path: path.read_bytes() for path in records(tmp_path)} == sound
    assert everything(tmp_path) == before


def test_a_damaged_record_without_an_index_makes_rebuilding_fail(tmp_path: Path) -> None:
    fill(tmp_path)
    records(tmp_path)[2].write_bytes(b"{}")
    (tmp_path / "index.db").unlink()
    with pytest.raises(Corrupt, match=r"0003\.json"):
        rebuild_folder(tmp_path)
    with pytest.raises(PreconditionFailed):
        LocalRegistry(tmp_path)


def test_rebuilding_works_with_a_damaged_manifest(tmp_path: Path) -> None:
    fill(tmp_path)
    registry = LocalRegistry(tmp_path)
    (tmp_path / content_path("manifests", registry.get("acme/tiny", 1).manifest_digest)).unlink()
    registry.close()
    (tmp_path / "index.db").unlink()
    rebuild_folder(tmp_path)
    listed = LocalRegistry(tmp_path).list_versions("acme/tiny")
    assert [bool(version.damage) for version in listed] == [False, True]


def test_a_record_that_could_not_be_written_is_written_with_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = LocalRegistry(tmp_path)
    publish(registry, "one")

    def full(self: FolderRecords, path: str, data: bytes) -> bool:
        raise registry_error(OSError(errno.ENOSPC, "No space left on device"), "a record")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(FolderRecords, "create", full)
        assert publish(registry, "two") == 2
    assert any("journal" in entry["event"] for entry in logs)
    assert len(records(tmp_path)) == 2
    registry.set_alias("acme/tiny", "stable", 1)
    assert len(records(tmp_path)) == 5
    before = registry.alias_history("acme/tiny", "latest")
    registry.close()
    (tmp_path / "index.db").unlink()
    rebuild_folder(tmp_path)
    assert LocalRegistry(tmp_path).alias_history("acme/tiny", "latest") == before


@pytest.mark.parametrize("foreign", [False, True])
def test_rebuilding_refuses_to_replace_a_foreign_or_newer_database(
    tmp_path: Path, foreign: bool
) -> None:
    fill(tmp_path)
    with sqlite3.connect(tmp_path / "index.db") as connection:
        if foreign:
            connection.execute("PRAGMA application_id = 1")
        else:
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(PreconditionFailed) as raised:
        rebuild_folder(tmp_path)
    assert raised.value.reason == ("FOREIGN_DATABASE" if foreign else "SCHEMA_TOO_NEW")
    assert not (tmp_path / "index.db.replaced").exists()
