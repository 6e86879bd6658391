"""A SQLite file with transactions, a schema version and errors mapped to NeapError.

It uses WAL and `synchronous=FULL`: a committed transaction survives a power cut, and readers never wait for a writer.
Several processes may open the same file. Within a process all threads share one connection and one lock, so
transactions run one at a time.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.errors import Corrupt, Exhausted, NeapError, PreconditionFailed, Unavailable
from shared.files import file_lock
from shared.timeouts import DATABASE_BUSY_S


def sqlite_error(error: sqlite3.Error, path: Path) -> NeapError:
    """Map a SQLite error to a NeapError. The text of the SQLite error is only in the chained exception."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    name = getattr(error, "sqlite_errorname", "")
    metadata = {"file": path.name, "sqlite_error": name}
    # SQLite reports a full file system as FULL, but a write cut short by a quota or by RLIMIT_FSIZE (EFBIG) as
    # IOERR_WRITE.
    if code == sqlite3.SQLITE_FULL or name in ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"):
        return Exhausted(f"no space left for {path.name}; nothing was changed", reason="DISK_FULL", metadata=metadata)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Corrupt(f"{path.name} is not an intact SQLite database", metadata=metadata)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(f"{path.name} is locked by another process", reason="DATABASE_BUSY", metadata=metadata)
    return Unavailable(
        f"{path.name} cannot be used ({name or type(error).__name__})", reason="STORAGE_UNAVAILABLE", metadata=metadata
    )


class Database:
    """A SQLite database at `path`, created if it does not exist.

    `schema` is executed once on a new file, whose `user_version` becomes `schema_version`.

    Raises PreconditionFailed (reason SCHEMA_NOT_SUPPORTED, FOREIGN_DATABASE), Corrupt, Exhausted, Unavailable
    (DATABASE_BUSY, LOCKED, DATABASE_REPLACED: the file was removed or replaced since it was opened).
    """

    def __init__(self, path: Path, *, schema: str, schema_version: int, application_id: int) -> None:
        self.path = path
        self._lock = threading.RLock()
        # A lock file, because two processes may create the same file at once and switching to WAL ignores the busy
        # timeout.
        with file_lock(path.with_name(path.name + ".lock")):
            with self._errors():
                self._connection = sqlite3.connect(
                    path, timeout=DATABASE_BUSY_S, isolation_level=None, check_same_thread=False
                )
                self._connection.row_factory = sqlite3.Row
            try:
                self._prepare(schema, schema_version, application_id)
            except BaseException:
                self._connection.close()
                raise

    def _check_file(self) -> None:
        # SQLite continues to use a file that was removed or replaced, so what it writes there would be lost.
        if _identity(self.path) != self._file:
            raise Unavailable(
                f"{self.path} was removed or replaced while it was in use; restart this process",
                reason="DATABASE_REPLACED",
                metadata={"file": self.path.name},
            )

    def _prepare(self, schema: str, schema_version: int, application_id: int) -> None:
        with self._errors():
            found_application = int(self._pragma("application_id"))
            found_version = int(self._pragma("user_version"))
            tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        self._file = _identity(self.path)  # SQLite opens the file with the first query
        if tables and found_application != application_id:
            raise PreconditionFailed(
                f"{self.path} is the SQLite database of another program", reason="FOREIGN_DATABASE"
            )
        if tables and found_version != schema_version:
            raise PreconditionFailed(
                f"{self.path} was written by another version of neap (schema {found_version}; this one reads"
                f" {schema_version}): use that version or another folder, or move the file away",
                reason="SCHEMA_NOT_SUPPORTED",
                metadata={"found": str(found_version), "supported": str(schema_version)},
            )
        with self._errors():
            self._pragma("journal_mode = WAL")
            self._pragma("synchronous = FULL")
            self._pragma("foreign_keys = ON")
        if not tables:
            with self.transaction() as connection:
                for statement in schema.split(";"):
                    if statement.strip():
                        connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {application_id}")
                connection.execute(f"PRAGMA user_version = {schema_version}")

    def _pragma(self, text: str) -> Any:
        row = self._connection.execute(f"PRAGMA {text}").fetchone()
        return None if row is None else row[0]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise sqlite_error(error, self.path) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one write transaction, committed at its end. An exception rolls it back.

        Raises Exhausted (reason DISK_FULL), Unavailable, Corrupt.
        """
        with self._lock, self._errors():
            self._check_file()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # After some errors, such as a full disk, SQLite has already rolled back.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return all rows of a query that only reads."""
        with self._lock, self._errors():
            self._check_file()
            return self._connection.execute(query, parameters).fetchall()

    def row(self, query: str, parameters: Sequence[Any] = ()) -> sqlite3.Row | None:
        """Return the first row of a query that only reads, or None."""
        rows = self.rows(query, parameters)
        return rows[0] if rows else None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._lock:
            self._connection.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
