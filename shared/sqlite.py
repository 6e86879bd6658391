"""One SQLite file under one lock: transactions, schema version, and its errors as ours.

WAL and `synchronous=FULL`: what a transaction committed survives a power cut, and readers never wait for a writer. Several
processes may open the same file; within a process one connection is shared by all threads, one transaction at a time.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.errors import Corrupt, Exhausted, NeapError, PreconditionFailed, Unavailable
from shared.file_lock import file_lock
from shared.timeouts import DATABASE_BUSY_S


def sqlite_error(error: sqlite3.Error, path: Path) -> NeapError:
    """What a SQLite error means to a caller; its text stays in the chained exception."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    name = getattr(error, "sqlite_errorname", "")
    metadata = {"file": path.name, "sqlite_error": name}
    # A write cut short by a quota or by RLIMIT_FSIZE (EFBIG) comes as IOERR_WRITE, a full file system as FULL.
    if code == sqlite3.SQLITE_FULL or name in ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"):
        return Exhausted(
            f"no space left for {path.name}; nothing was changed",
            reason="DISK_FULL",
            metadata=metadata,
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Corrupt(f"{path.name} is not a sound SQLite database", metadata=metadata)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(
            f"{path.name} is locked by another process", reason="DATABASE_BUSY", metadata=metadata
        )
    return Unavailable(
        f"{path.name} cannot be used ({name or type(error).__name__})",
        reason="STORAGE_UNAVAILABLE",
        metadata=metadata,
    )


class Database:
    """`schema` is executed once on a new file, whose `user_version` becomes `schema_version`. `migrations[n]` takes a file of
    version n to n + 1. `before_create` is called before that is done to a new file, and may raise. `check_pages`: read the whole
    file once and see whether it is sound.

    Raises PreconditionFailed (reason SCHEMA_TOO_NEW, FOREIGN_DATABASE), Corrupt, Exhausted, Unavailable (DATABASE_BUSY, LOCKED,
    DATABASE_REPLACED: the file was removed or replaced since it was opened).
    """

    def __init__(
        self,
        path: Path,
        *,
        schema: str,
        schema_version: int,
        application_id: int,
        migrations: Mapping[int, str] | None = None,
        before_create: Callable[[], None] = lambda: None,
        check_pages: bool = False,
    ) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._before_create = before_create
        # Two processes that create the same file at once: switching to WAL ignores the busy timeout, so a lock file it is.
        with file_lock(path.with_name(path.name + ".lock")):
            with self._errors():
                self._connection = sqlite3.connect(
                    path, timeout=DATABASE_BUSY_S, isolation_level=None, check_same_thread=False
                )
                self._connection.row_factory = sqlite3.Row
            try:
                self._prepare(schema, schema_version, application_id, migrations or {})
                if check_pages:
                    self._check_pages()
            except BaseException:
                self._connection.close()
                raise

    def _check_pages(self) -> None:
        with self._errors():
            found = self._pragma("quick_check(1)")
        if found != "ok":
            raise Corrupt(
                f"{self.path.name} is not a sound SQLite database",
                metadata={"file": self.path.name, "sqlite_error": str(found)[:200]},
            )

    def _check_file(self) -> None:
        # SQLite goes on with a file that was removed or replaced, and what it writes is lost with it.
        if _identity(self.path) != self._file:
            raise Unavailable(
                f"{self.path} was removed or replaced while it was in use: restart this process",
                reason="DATABASE_REPLACED",
                metadata={"file": self.path.name},
            )

    def _prepare(
        self,
        schema: str,
        schema_version: int,
        application_id: int,
        migrations: Mapping[int, str],
    ) -> None:
        with self._errors():
            found_application = int(self._pragma("application_id"))
            found_version = int(self._pragma("user_version"))
            tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        self._file = _identity(self.path)  # SQLite opens it with the first question
        if tables and found_application != application_id:
            raise PreconditionFailed(
                f"{self.path} is a SQLite database of another program", reason="FOREIGN_DATABASE"
            )
        if found_version > schema_version:
            raise PreconditionFailed(
                f"{self.path} was written by a newer neap (schema {found_version}; this one reads up to"
                f" {schema_version}): upgrade neap, or use another folder",
                reason="SCHEMA_TOO_NEW",
                metadata={"found": str(found_version), "supported": str(schema_version)},
            )
        if not tables:
            self._before_create()
        with self._errors():
            self._pragma("journal_mode = WAL")
            self._pragma("synchronous = FULL")
            self._pragma("foreign_keys = ON")
        steps = [migrations[version] for version in range(found_version, schema_version) if tables]
        if not tables or steps:
            with self.transaction() as connection:
                for statement in ";".join(steps or [schema]).split(";"):
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
        """A write transaction: everything inside or nothing. Raises Exhausted (reason DISK_FULL), Unavailable, Corrupt."""
        with self._lock, self._errors():
            self._check_file()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some errors, a full disk among them.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """All rows of a read."""
        with self._lock, self._errors():
            self._check_file()
            return self._connection.execute(query, parameters).fetchall()

    def row(self, query: str, parameters: Sequence[Any] = ()) -> sqlite3.Row | None:
        """The first row of a read, or None."""
        rows = self.rows(query, parameters)
        return rows[0] if rows else None

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._connection.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
