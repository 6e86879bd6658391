"""Rebuilds a folder's index.db from its journal, for `neap routers rebuild-index`."""

import json
from collections.abc import Callable
from pathlib import Path

import structlog

from shared.errors import Corrupt, NotFound, PreconditionFailed
from shared.file_lock import file_lock
from shared.files import sync_folder
from shared.registry.blobs import ContentStore
from shared.registry.folder_records import FolderRecords
from shared.registry.index import INDEX_NAME, RegistryIndex
from shared.registry.journal import Entry, Journal, VersionRecord
from shared.registry.local_journal import LocalJournal
from shared.registry.state import ModelState, advance

IN_USE_LOCK = "open.lock"
_SIDE_FILES = ("", "-wal", "-shm")
log = structlog.get_logger("neap.registry")

Blobs = Callable[[VersionRecord], dict[str, str]]


def rebuild_folder(root: Path) -> dict[str, ModelState]:
    """Rebuild the index and return its new state by model.

    A readable index is changed in one transaction, which is safe while services run. A missing or damaged index is replaced, which
    needs exclusive use of the folder; the old file is kept as index.db.replaced.

    Raises NotFound (no journal), Corrupt (the journal is damaged; the index stays as it is), PreconditionFailed
    (REGISTRY_IN_USE, SCHEMA_TOO_NEW, FOREIGN_DATABASE), Unavailable, Exhausted.
    """
    if not root.is_dir():
        raise NotFound(f"the folder {root} does not exist")
    try:
        index = RegistryIndex(root / INDEX_NAME, before_create=_refuse)
    except (Corrupt, _Missing) as error:
        return _replace(root, error)
    try:
        return _refill(root, index)
    except Corrupt as error:
        if error.reason != "CORRUPT" or error.metadata.get("file") != INDEX_NAME:
            raise
        damaged = error
    finally:
        index.database.close()
    return _replace(root, damaged)


class _Missing(Exception):
    pass


def _refuse() -> None:
    raise _Missing


def _refill(root: Path, index: RegistryIndex) -> dict[str, ModelState]:
    local = LocalJournal(root, index)
    # Writers wait during the transaction, so no event is committed between reading the index and refilling it.
    with index.database.transaction() as connection:
        for model_id in index.models():
            if not local.journal.has(model_id, index.num_events(model_id) + 1):
                try:
                    local.repair(model_id)
                except Corrupt as error:
                    log.warning("the index is damaged, too", problem=error.message)
        records, states = _read(root, local.journal)
        index.clear(connection)
        index.restore(connection, records, _blobs_of(root))
    return states


def _replace(root: Path, why: Exception) -> dict[str, ModelState]:
    in_use = PreconditionFailed(
        f"a service or a command has {root} open; stop it first, because the unreadable {INDEX_NAME} must be replaced",
        reason="REGISTRY_IN_USE",
    )
    with file_lock(root / IN_USE_LOCK, timeout_s=0, locked=in_use):
        log.warning("index.db is made anew", problem=str(why) or "it is missing")
        records, states = _read(root, Journal(FolderRecords(root)))
        made = root / f"{INDEX_NAME}.new"
        _move(made, None)
        index = RegistryIndex(made)
        try:
            with index.database.transaction() as connection:
                index.restore(connection, records, _blobs_of(root))
        finally:
            index.database.close()
        _move(root / INDEX_NAME, root / f"{INDEX_NAME}.replaced")
        made.rename(root / INDEX_NAME)
        (root / f"{INDEX_NAME}.new.lock").unlink(missing_ok=True)
        sync_folder(root)
        return states


def _move(database: Path, target: Path | None) -> None:
    """Move the database and its side files, the database last. `target` None removes them."""
    for ending in reversed(_SIDE_FILES):
        path = database.with_name(database.name + ending)
        if target is not None and path.exists():
            path.replace(target.with_name(target.name + ending))
        else:
            path.unlink(missing_ok=True)
            if target is not None:
                target.with_name(target.name + ending).unlink(missing_ok=True)


def _read(root: Path, journal: Journal) -> tuple[list[Entry], dict[str, ModelState]]:
    records: list[Entry] = []
    states: dict[str, ModelState] = {}
    for model_id in journal.models():
        entries = journal.after(model_id, 0)
        states[model_id] = advance(ModelState(), entries).state
        records += entries
    if not records:
        raise NotFound(
            f"{root} has no journal from which to rebuild an index: nothing was published into it, or only by a neap without a"
            f" journal. Restore {INDEX_NAME} from a backup",
            reason="NO_JOURNAL",
        )
    return sorted(records, key=lambda entry: entry.event or 0), states


def _blobs_of(root: Path) -> Blobs:
    store = ContentStore(root, step=lambda name: None)

    def blobs(version: VersionRecord) -> dict[str, str]:
        """Return name -> digest, empty for a damaged manifest."""
        try:
            manifest = json.loads(store.read("manifests", version.manifest_digest))
        except Corrupt as error:
            log.error("a version is damaged", version=version.version, problem=error.message)
            return {}
        return {name: str(blob["digest"]) for name, blob in manifest["blobs"].items()}

    return blobs
