"""The embedded registry, which needs no server: SQLite for versions, aliases and events, a content-addressed folder for contents."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from sqlite3 import Row
from typing import Any

from shared.errors import Corrupt, NotFound, PreconditionFailed, Unavailable
from shared.file_lock import file_lock
from shared.registry.alias_moves import AliasMove
from shared.registry.alias_operations import AliasOperations, Propose
from shared.registry.base import (
    AliasChange,
    AliasTarget,
    Canary,
    PublishedVersion,
    RegistryEvent,
)
from shared.registry.blobs import ContentStore, StepHook, registry_error
from shared.registry.canonical import digest_of
from shared.registry.contents import (
    blob_digest,
    blob_size_bytes,
    check_limit,
    check_passed,
    encode_manifest,
    no_alias_error,
    no_version_error,
)
from shared.registry.folder_records import FolderRecords
from shared.registry.index import (
    INDEX_NAME,
    LARGEST_INTEGER,
    RegistryIndex,
    index_damaged_error,
    version_record,
)
from shared.registry.journal import Journal, VersionRecord
from shared.registry.local_journal import LocalJournal
from shared.registry.local_rebuild import IN_USE_LOCK
from shared.registry.names import (
    check_alias,
    check_model_id,
    check_publication,
    unique_aliases,
)
from shared.registry.version_reader import version_of

_POLL_INTERVAL_S = 0.05


class LocalRegistry(AliasOperations):
    """A `Registry` in the folder `root`, which is created if it does not exist. Several processes may use one folder at once.

    `step` is called with the name of each step of a publication, for fault injection in tests. Do not share an instance
    across `fork`. Raises PreconditionFailed (SCHEMA_TOO_NEW), Unavailable, Exhausted (DISK_FULL), Corrupt.
    """

    # Unavailable, too: an unreadable file says nothing about other files.
    damages = (Corrupt, Unavailable)

    def __init__(self, root: Path, *, step: StepHook = lambda name: None) -> None:
        self.root = root
        self._step = step
        with ExitStack() as stack:
            try:
                root.mkdir(parents=True, exist_ok=True)
                # A process that replaces index.db needs exclusive use of the folder.
                stack.enter_context(file_lock(root / IN_USE_LOCK, shared=True))
                self._index = RegistryIndex(root / INDEX_NAME, before_create=self._check_not_lost)
                stack.callback(self._index.database.close)
                self._store = ContentStore(root, step=step)
                self._store.sweep(self._index.is_referenced)
                self._journal = LocalJournal(root, self._index)
                self._journal.open()
            except OSError as error:
                raise registry_error(error, "opening the registry") from error
            except Corrupt as error:
                if error.metadata.get("file") == INDEX_NAME:
                    raise self._with_rebuild_advice(error) from error
                raise
            self._open = stack.pop_all()

    def _check_not_lost(self) -> None:
        """Check, before a missing index is created, that there never was one. Raises PreconditionFailed (INDEX_MISSING)."""
        if Journal(FolderRecords(self.root)).models():
            raise PreconditionFailed(
                f"{self.root} contains routers, but its {INDEX_NAME} is missing or empty;"
                f" `neap routers rebuild-index --registry {self.root}` rebuilds it from the journal",
                reason="INDEX_MISSING",
            )
        if any((self.root / "manifests").rglob("*")):
            raise PreconditionFailed(
                f"{self.root} contains routers, but its {INDEX_NAME} is missing or empty, and they were published by a neap without"
                f" a journal; restore {INDEX_NAME} from a backup, or use another folder",
                reason="INDEX_MISSING",
            )

    def _with_rebuild_advice(self, error: Corrupt) -> Corrupt:
        return Corrupt(
            f"{error.message}; `neap routers rebuild-index --registry {self.root}` rebuilds it from the journal",
            reason="INDEX_DAMAGED",
            metadata=error.metadata,
        )

    def publish(
        self,
        model_id: str,
        manifest: Mapping[str, Any],
        blobs: Mapping[str, bytes],
        *,
        request_id: str,
        aliases: Sequence[str] = ("latest",),
        actor: str = "",
    ) -> PublishedVersion:
        """See `Registry.publish`. A repeated request moves no alias."""
        check_publication(model_id, request_id, actor)
        aliases = unique_aliases(aliases)
        if aliases:
            check_passed(manifest, "the router to be published")
        encoded = encode_manifest(manifest, blobs)
        digest = digest_of(encoded)
        done = self._index.find_request(request_id, model_id, digest)
        if done is not None:
            return version_of(model_id, version_record(done), json.loads(encoded))
        try:
            with self._store.publishing() as staging:
                for name in sorted(blobs):
                    staging.put("blobs", blobs[name])
                staging.put("manifests", encoded)
                self._step("index:begin")
                with self._index.database.transaction() as connection:
                    done = self._index.find_request(request_id, model_id, digest)
                    if done is None:
                        self._journal.check_index(model_id)
                        done = self._index.add_version(
                            connection,
                            model_id,
                            manifest_digest=digest,
                            blobs=json.loads(encoded)["blobs"],
                            request_id=request_id,
                            aliases=aliases,
                            actor=actor,
                        )
                    self._step("index:before-commit")
                self._step("index:committed")
                self._journal.append_missing(model_id)
        except OSError as error:
            self._store.sweep(self._index.is_referenced)
            raise registry_error(error, "a router") from error
        except BaseException:
            self._store.sweep(self._index.is_referenced)
            raise
        return version_of(model_id, version_record(done), json.loads(encoded))

    def _find_record(self, model_id: str, version: int) -> VersionRecord:
        return version_record(self._row(model_id, version))

    def _version_of_request(self, model_id: str, request_id: str) -> int | None:
        return self._index.version_of_request(model_id, request_id)

    def _row(self, model_id: str, version: int) -> Row:
        check_model_id(model_id)
        row = None
        if 1 <= version <= LARGEST_INTEGER:
            row = self._index.version(model_id, version)
        if row is None:
            raise no_version_error(model_id, version)
        return row

    def _read_manifest(self, digest: str, *, is_fresh: bool) -> bytes:
        return self._store.read("manifests", digest)

    def _listed_row(self, row: Row) -> PublishedVersion:
        try:
            record = version_record(row)
        except Corrupt as error:
            return PublishedVersion(
                row["model_id"], row["version"], "", 0.0, 0, {}, damage=error.message
            )
        return self._listed(row["model_id"], record)

    def resolve(self, model_id: str, alias: str) -> PublishedVersion:
        """Raises NotFound, Corrupt."""
        return self.get(model_id, self._last_change(model_id, alias).to_version)

    def target(self, model_id: str, alias: str) -> AliasTarget:
        """Raises NotFound."""
        last = self._last_change(model_id, alias)
        return AliasTarget(self._listed_row(self._row(model_id, last.to_version)), last.canary)

    def _last_change(self, model_id: str, alias: str) -> AliasChange:
        check_model_id(model_id)
        check_alias(alias)
        last = self._index.last_change(model_id, alias)
        if last is None:
            raise no_alias_error(model_id, alias, self.aliases(model_id))
        return last

    def list_versions(
        self, model_id: str, *, before: int | None = None, limit: int = 100
    ) -> list[PublishedVersion]:
        """See `Registry.list_versions`. `limit` is in [1, 1000]. Raises InvalidInput, and Corrupt if the index cannot be read."""
        check_model_id(model_id)
        check_limit(limit)
        before = LARGEST_INTEGER if before is None else min(max(before, 0), LARGEST_INTEGER)
        rows = self._index.database.rows(
            "SELECT * FROM versions WHERE model_id = ? AND version < ? ORDER BY version DESC LIMIT ?",
            (model_id, before, limit),
        )
        return [self._listed_row(row) for row in rows]

    def read_blob(self, version: PublishedVersion, name: str) -> bytes:
        """Raises NotFound, Corrupt with metadata expected_digest and actual_digest."""
        digest = blob_digest(version.manifest, name, version.model_id, version.version)
        return self._store.read("blobs", digest, blob_size_bytes(version.manifest, name))

    def aliases(self, model_id: str) -> dict[str, int]:
        """In alphabetical order."""
        check_model_id(model_id)
        return self._index.aliases(model_id)

    def canaries(self, model_id: str) -> dict[str, Canary]:
        """In alphabetical order."""
        check_model_id(model_id)
        return self._index.canaries(model_id)

    def _change_alias(self, move: AliasMove, propose: Propose) -> AliasChange:
        with self._index.database.transaction() as connection:
            last = self._index.last_change(move.model_id, move.alias)
            proposed = propose(last)
            if proposed != last:
                self._journal.check_index(move.model_id)
                self._index.record(connection, proposed)
        if proposed != last:
            self._journal.append_missing(move.model_id)
        return proposed

    def alias_history(self, model_id: str, alias: str) -> list[AliasChange]:
        """Newest first. Raises NotFound."""
        self._last_change(model_id, alias)
        return self._index.changes(model_id, alias, limit=-1)

    def events(
        self, model_id: str, *, after_event: int = 0, timeout_s: float = 0.0
    ) -> Iterator[RegistryEvent]:
        """Iterate over events in order up to the newest. Raises InvalidInput, Corrupt."""
        check_model_id(model_id)
        give_up_at = time.monotonic() + timeout_s
        after_event = min(max(after_event, 0), LARGEST_INTEGER)
        rows = self._index.event_rows(model_id, after_event)
        while not rows and (remaining_s := give_up_at - time.monotonic()) > 0:
            time.sleep(min(_POLL_INTERVAL_S, remaining_s))
            rows = self._index.event_rows(model_id, after_event)
        while rows:
            for row in rows:
                yield RegistryEvent(row["event"], self._event_change(row))
            rows = self._index.event_rows(model_id, rows[-1]["event"])

    def last_event(self, model_id: str) -> int:
        """See `Registry.last_event`."""
        check_model_id(model_id)
        return self._index.last_event(model_id)

    def _event_change(self, row: Row) -> PublishedVersion | AliasChange:
        if row["version"] is not None:
            try:
                return self._listed_row(self._row(row["model_id"], row["version"]))
            except NotFound as error:
                raise index_damaged_error(f"its row of version {row['version']}") from error
        return self._index.change(row["change"])

    def check_writable(self) -> None:
        """See `Registry.check_writable`."""
        with self._store.publishing(), self._index.database.transaction():
            pass

    def close(self) -> None:
        """Idempotent."""
        self._open.close()
