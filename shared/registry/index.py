"""The SQL index of the embedded registry: its versions, aliases and events. The contents are stored elsewhere."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from sqlite3 import Connection, Row
from typing import Any

from shared.errors import Corrupt
from shared.registry.alias_moves import AliasMove
from shared.registry.base import AliasChange, Canary
from shared.registry.contents import Kind, other_contents_error
from shared.registry.journal import Entry, VersionRecord
from shared.sqlite import Database

INDEX_NAME = "index.db"
SCHEMA_VERSION = 2
APPLICATION_ID = 0x6E656170
LARGEST_INTEGER = 2**63 - 1
_EVENT_PAGE = 100

_SCHEMA = """
CREATE TABLE versions (
    model_id TEXT NOT NULL, version INTEGER NOT NULL, manifest_digest TEXT NOT NULL, create_time_s REAL NOT NULL,
    size_bytes INTEGER NOT NULL, request_id TEXT NOT NULL UNIQUE, actor TEXT NOT NULL, PRIMARY KEY (model_id, version));
CREATE INDEX versions_by_manifest ON versions (manifest_digest);
CREATE TABLE version_blobs (
    model_id TEXT NOT NULL, version INTEGER NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (model_id, version, name), FOREIGN KEY (model_id, version) REFERENCES versions);
CREATE INDEX version_blobs_by_digest ON version_blobs (digest);
CREATE TABLE aliases (
    model_id TEXT NOT NULL, alias TEXT NOT NULL, version INTEGER NOT NULL, canary_version INTEGER,
    canary_per_mille INTEGER, PRIMARY KEY (model_id, alias), FOREIGN KEY (model_id, version) REFERENCES versions);
CREATE TABLE alias_changes (
    change INTEGER PRIMARY KEY AUTOINCREMENT, model_id TEXT NOT NULL, alias TEXT NOT NULL, from_version INTEGER,
    to_version INTEGER NOT NULL, actor TEXT NOT NULL, reason TEXT NOT NULL, change_time_s REAL NOT NULL,
    canary_version INTEGER, canary_per_mille INTEGER, FOREIGN KEY (model_id, to_version) REFERENCES versions);
CREATE INDEX alias_changes_by_alias ON alias_changes (model_id, alias, change);
CREATE TABLE events (
    event INTEGER PRIMARY KEY AUTOINCREMENT, model_id TEXT NOT NULL, version INTEGER, change INTEGER,
    CHECK ((version IS NULL) <> (change IS NULL)));
CREATE INDEX events_by_model ON events (model_id, event);
"""
_OPTIONAL_NUMBERS = ("from_version", "canary_version", "canary_per_mille")
_CANARY_COLUMNS = ";".join(
    f"ALTER TABLE {table} ADD COLUMN {column} INTEGER"
    for table in ("aliases", "alias_changes")
    for column in ("canary_version", "canary_per_mille")
)


class RegistryIndex:
    """Methods that take a connection must be called inside `database.transaction()`.

    `before_create` is called before a missing index is created, and may raise. Raises the errors of `Database`.
    """

    def __init__(self, path: Path, *, before_create: Callable[[], None] = lambda: None) -> None:
        self.database = Database(
            path,
            schema=_SCHEMA,
            schema_version=SCHEMA_VERSION,
            application_id=APPLICATION_ID,
            migrations={1: _CANARY_COLUMNS},
            before_create=before_create,
            check_pages=True,
        )

    def find_request(self, request_id: str, model_id: str, manifest_digest: str) -> Row | None:
        """Return the version that `request_id` created, or None. Raises AlreadyExists if it has other contents."""
        row = self.database.row("SELECT * FROM versions WHERE request_id = ?", (request_id,))
        if row is not None and (row["model_id"], row["manifest_digest"]) != (
            model_id,
            manifest_digest,
        ):
            raise other_contents_error(request_id, row["model_id"], row["version"])
        return row

    def version_of_request(self, model_id: str, request_id: str) -> int | None:
        row = self.database.row(
            "SELECT version FROM versions WHERE request_id = ? AND model_id = ?",
            (request_id, model_id),
        )
        return None if row is None else int(row["version"])

    def add_version(
        self,
        connection: Connection,
        model_id: str,
        *,
        manifest_digest: str,
        blobs: Mapping[str, Any],
        request_id: str,
        aliases: Sequence[str],
        actor: str,
    ) -> Row:
        """Add the next version with its event, and move its aliases. `blobs` maps name -> {"digest", "size_bytes"}."""
        size_bytes = sum(entry["size_bytes"] for entry in blobs.values())
        (version,) = connection.execute(
            "SELECT coalesce(max(version), 0) + 1 FROM versions WHERE model_id = ?", (model_id,)
        ).fetchone()
        record = VersionRecord(version, manifest_digest, time.time(), size_bytes, request_id, actor)
        digests = {name: str(entry["digest"]) for name, entry in blobs.items()}
        self._insert(connection, model_id, record, digests)
        for alias in aliases:
            move = AliasMove(model_id, alias, actor, "published")
            self.record(connection, move.change(self.last_change(model_id, alias), version))
        row: Row = connection.execute(
            "SELECT * FROM versions WHERE model_id = ? AND version = ?", (model_id, version)
        ).fetchone()
        return row

    def _insert(
        self,
        connection: Connection,
        model_id: str,
        record: VersionRecord,
        blobs: Mapping[str, str],
        event: int | None = None,
    ) -> None:
        connection.execute(
            "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                model_id,
                record.version,
                record.manifest_digest,
                record.create_time_s,
                record.size_bytes,
                record.request_id,
                record.actor,
            ),
        )
        connection.executemany(
            "INSERT INTO version_blobs VALUES (?, ?, ?, ?)",
            [(model_id, record.version, name, digest) for name, digest in blobs.items()],
        )
        connection.execute(
            "INSERT INTO events (event, model_id, version) VALUES (?, ?, ?)",
            (event, model_id, record.version),
        )

    def clear(self, connection: Connection) -> None:
        """Delete all rows. The counters are kept, so numbers are not reused."""
        for table in ("events", "alias_changes", "aliases", "version_blobs", "versions"):
            connection.execute(f"DELETE FROM {table}")

    def restore(
        self,
        connection: Connection,
        entries: Iterable[Entry],
        blobs_of: Callable[[VersionRecord], Mapping[str, str]],
    ) -> None:
        """Fill an empty index from the `entries` of all models, in the order of their events. `blobs_of` returns name -> digest."""
        for entry in entries:
            if (made := entry.published) is not None:
                self._insert(connection, entry.model_id, made, blobs_of(made), entry.event)
            for change in entry.changes:
                self.record(connection, change, entry.event)

    def models(self) -> list[str]:
        """List all models that have an event, in order."""
        rows = self.database.rows("SELECT DISTINCT model_id FROM events ORDER BY model_id")
        return [row["model_id"] for row in rows]

    def num_events(self, model_id: str) -> int:
        row = self.database.row(
            "SELECT count(*) AS found FROM events WHERE model_id = ?", (model_id,)
        )
        assert row is not None
        return int(row["found"])

    def entries(self, model_id: str, *, after: int) -> list[Entry]:
        """Return the model's events after the first `after` ones as journal records. Raises Corrupt (INDEX_DAMAGED)."""
        rows = self.database.rows(
            "SELECT * FROM events WHERE model_id = ? ORDER BY event LIMIT -1 OFFSET ?",
            (model_id, after),
        )
        return [self._entry(row, number) for number, row in enumerate(rows, start=after + 1)]

    def _entry(self, row: Row, number: int) -> Entry:
        event, entry_id = row["event"], f"event-{row['event']}"
        if row["version"] is None:
            change = self.change(row["change"])
            return Entry(row["model_id"], number, (change,), None, entry_id, event)
        version = self.version(row["model_id"], row["version"])
        if version is None:
            raise index_damaged_error(f"its row of version {row['version']} of {row['model_id']!r}")
        return Entry(row["model_id"], number, (), version_record(version), entry_id, event)

    def version(self, model_id: str, version: int) -> Row | None:
        return self.database.row(
            "SELECT * FROM versions WHERE model_id = ? AND version = ?", (model_id, version)
        )

    def record(self, connection: Connection, change: AliasChange, event: int | None = None) -> None:
        """Apply `change`, whose versions must exist, to its alias and record it. `event` is its number if it already has one."""
        key = (change.model_id, change.alias)
        canary: tuple[int | None, int | None] = (None, None)
        if change.canary is not None:
            canary = (change.canary.version, change.canary.share_per_mille)
        connection.execute(
            "INSERT OR REPLACE INTO aliases (model_id, alias, version, canary_version, canary_per_mille)"
            " VALUES (?, ?, ?, ?, ?)",
            (*key, change.to_version, *canary),
        )
        inserted = connection.execute(
            "INSERT INTO alias_changes (model_id, alias, from_version, to_version, actor, reason, change_time_s,"
            " canary_version, canary_per_mille) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *key,
                change.from_version,
                change.to_version,
                change.actor,
                change.reason,
                change.change_time_s,
                *canary,
            ),
        )
        connection.execute(
            "INSERT INTO events (event, model_id, change) VALUES (?, ?, ?)",
            (event, change.model_id, inserted.lastrowid),
        )

    def last_change(self, model_id: str, alias: str) -> AliasChange | None:
        """Return the alias' last change. None if there is no such alias."""
        changes = self.changes(model_id, alias, limit=1)
        return changes[0] if changes else None

    def changes(self, model_id: str, alias: str, *, limit: int) -> list[AliasChange]:
        """Return the alias' changes, newest first. A negative `limit` means all."""
        rows = self.database.rows(
            "SELECT * FROM alias_changes WHERE model_id = ? AND alias = ? ORDER BY change DESC LIMIT ?",
            (model_id, alias, limit),
        )
        return [_change(row) for row in rows]

    def event_rows(self, model_id: str, after_event: int) -> list[Row]:
        """Return the next page of events. Each row has either a version or a change."""
        return self.database.rows(
            "SELECT * FROM events WHERE model_id = ? AND event > ? ORDER BY event LIMIT ?",
            (model_id, after_event, _EVENT_PAGE),
        )

    def change(self, number: int) -> AliasChange:
        """Return a recorded change. Raises Corrupt (INDEX_DAMAGED), also if it is missing, because an event refers to it."""
        row = self.database.row("SELECT * FROM alias_changes WHERE change = ?", (number,))
        if row is None:
            raise index_damaged_error(f"its row of change {number}")
        return _change(row)

    def aliases(self, model_id: str) -> dict[str, int]:
        """Return alias -> version in alphabetical order."""
        rows = self.database.rows(
            "SELECT alias, version FROM aliases WHERE model_id = ? ORDER BY alias", (model_id,)
        )
        return {row["alias"]: row["version"] for row in rows}

    def canaries(self, model_id: str) -> dict[str, Canary]:
        """In alphabetical order."""
        rows = self.database.rows(
            "SELECT * FROM aliases WHERE model_id = ? AND canary_version IS NOT NULL ORDER BY alias",
            (model_id,),
        )
        return {
            row["alias"]: Canary(row["canary_version"], row["canary_per_mille"]) for row in rows
        }

    def last_event(self, model_id: str) -> int:
        """Return the number of the newest event, 0 if there is none."""
        row = self.database.row(
            "SELECT coalesce(max(event), 0) AS newest FROM events WHERE model_id = ?", (model_id,)
        )
        assert row is not None
        return int(row["newest"])

    def is_referenced(self, kind: Kind, digest: str) -> bool:
        """Return whether any version uses this object."""
        query = (
            "SELECT 1 FROM version_blobs WHERE digest = ?"
            if kind == "blobs"
            else "SELECT 1 FROM versions WHERE manifest_digest = ?"
        )
        return self.database.row(query, (digest,)) is not None


def index_damaged_error(what: str) -> Corrupt:
    return Corrupt(
        f"{INDEX_NAME} is damaged: {what} is invalid; `neap routers rebuild-index` restores it",
        reason="INDEX_DAMAGED",
    )


def _change(row: Row) -> AliasChange:
    numbers = [row["to_version"]]
    numbers += [row[name] for name in _OPTIONAL_NUMBERS if row[name] is not None]
    if not all(isinstance(number, int) for number in numbers) or not isinstance(
        row["change_time_s"], float
    ):
        raise index_damaged_error(f"its row of change {row['change']} of alias {row['alias']!r}")
    canary = None
    if row["canary_version"] is not None:
        canary = Canary(row["canary_version"], row["canary_per_mille"])
    return AliasChange(
        row["model_id"],
        row["alias"],
        row["from_version"],
        row["to_version"],
        row["actor"],
        row["reason"],
        row["change_time_s"],
        canary,
    )


def version_record(row: Row) -> VersionRecord:
    """Read a version from its row. Checks the types, because SQLite columns may hold any type. Raises Corrupt (INDEX_DAMAGED)."""
    create_time_s, size_bytes = row["create_time_s"], row["size_bytes"]
    is_sound = isinstance(create_time_s, float) and math.isfinite(create_time_s)
    is_sound = is_sound and isinstance(size_bytes, int) and isinstance(row["manifest_digest"], str)
    if not is_sound:
        raise index_damaged_error(f"its row of version {row['version']} of {row['model_id']!r}")
    return VersionRecord(
        version=row["version"],
        manifest_digest=row["manifest_digest"],
        create_time_s=create_time_s,
        size_bytes=size_bytes,
        request_id=row["request_id"],
        actor=row["actor"],
    )
