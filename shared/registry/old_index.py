"""Takes over what only the `index.db` of an older neap holds.

Older versions ordered the events of a folder in SQLite and wrote their journal records afterwards, one per event. The
journal may lack the last records, if a process died in between, or all of them, if the folder is older than the
journal.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace

import structlog

from shared.errors import Corrupt
from shared.file_lock import file_lock
from shared.registry.base import AliasChange, Canary
from shared.registry.folder_store import PUBLISH_LOCK, FolderStore
from shared.registry.journal import Journal, JournalEntry, VersionRecord
from shared.registry.publication import claim
from shared.sqlite import sqlite_error
from shared.storage import storage_error
from shared.timeouts import DATABASE_BUSY_S

log = structlog.get_logger("neap.registry")


def take_over(store: FolderStore) -> None:
    """Write the records that the journal lacks or that are damaged, and the claims of request ids, and rename
    `index.db` to `index.db.old`.

    Processes of an older neap that have the folder open refuse to use it afterwards. Does nothing without an
    `index.db`. Raises Corrupt if it is damaged, Unavailable, Exhausted.
    """
    path = store.root / "index.db"
    if not path.exists():
        return
    try:
        # Publishers of both versions hold this lock. That of SQLite keeps out changes of aliases by an older one.
        with file_lock(store.root / PUBLISH_LOCK):
            if not path.exists():
                return  # another process was faster
            with closing(sqlite3.connect(path, DATABASE_BUSY_S, isolation_level=None)) as old:
                old.row_factory = sqlite3.Row
                old.execute("BEGIN IMMEDIATE")
                if old.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                    path.unlink()  # left by an older neap that found no index and refused to start
                    return
                num_records = _copy(old, store)
                path.rename(path.with_name("index.db.old"))
        log.info("the index of an older neap was taken over", records=num_records)
    except (sqlite3.Error, TypeError) as error:
        problem = sqlite_error(error, path) if isinstance(error, sqlite3.Error) else None
        if problem is not None and not isinstance(problem, Corrupt):
            raise problem from error
        raise Corrupt(
            f"{path} of an older neap is damaged. Move it away to use the folder without it: the journal has the same "
            "contents, except for a last change just before a crash"
        ) from error
    except OSError as error:
        raise storage_error(error, "the journal", place="the registry's folder") from error


def _copy(old: sqlite3.Connection, store: FolderStore) -> int:
    """Returns the number of records that were written."""
    (verdict,) = old.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    journal = Journal(store)
    num_records = 0
    for entry in _entries(old):
        try:
            journal.read(entry.model_id, entry.sequence)
        except Corrupt:  # or missing
            journal.restore(entry)
            num_records += 1
        if entry.published is not None:
            claim(store, entry.published.request_id, entry.model_id)
    return num_records


def _entries(old: sqlite3.Connection) -> Iterator[JournalEntry]:
    """Yields the records that the events of all models had or should have had.
    Raises TypeError if a row is missing or malformed."""
    num_events: dict[str, int] = {}
    for row in old.execute("SELECT * FROM events ORDER BY event").fetchall():
        event, model_id = row["event"], row["model_id"]
        sequence = num_events[model_id] = num_events.get(model_id, 0) + 1
        if row["version"] is None:
            query = "SELECT * FROM alias_changes WHERE change = ?"
            changes = (_change(old.execute(query, (row["change"],)).fetchone()),)
            yield JournalEntry(model_id, sequence, changes, None, f"event-{event}", event)
        else:
            query = "SELECT * FROM versions WHERE model_id = ? AND version = ?"
            version = _version(old.execute(query, (model_id, row["version"])).fetchone())
            yield JournalEntry(model_id, sequence, (), version, f"event-{event}", event)


def _version(row: sqlite3.Row) -> VersionRecord:
    version = VersionRecord(*(row[field.name] for field in fields(VersionRecord)))
    # SQLite columns may hold any type.
    if not isinstance(version.create_time_s, float) or not isinstance(version.manifest_digest, str):
        raise TypeError("a malformed version")
    return version


def _change(row: sqlite3.Row) -> AliasChange:
    names = [field.name for field in fields(AliasChange) if field.name != "canary"]
    change = AliasChange(*(row[name] for name in names))
    if not isinstance(change.change_time_s, float) or not isinstance(change.to_version, int):
        raise TypeError("a malformed change of an alias")
    # Before there were canaries, there was no column for them.
    if "canary_version" in row.keys() and row["canary_version"] is not None:  # noqa: SIM118
        canary = Canary(row["canary_version"], row["canary_per_mille"])
        return replace(change, canary=canary)
    return change
